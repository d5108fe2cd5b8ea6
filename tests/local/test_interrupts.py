"""Ctrl-C at every stage of the demo: it ends at once, and what is said of the cluster is true."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from plimsoll_local.cluster import Cluster
from plimsoll_local.demo import steps
from plimsoll_local.interrupts import interrupts_deferred


def interrupt(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    done = []

    def clean_up() -> None:
        with interrupts_deferred():
            interrupt()
            interrupt()
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        clean_up()
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_thread_is_left_alone() -> None:
    def enter() -> None:
        with interrupts_deferred():
            entered.set()

    entered = threading.Event()
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered.is_set()


class Stage:
    """A demo whose steps are stand-ins. `log` has what was reached."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
        self.log: list[str] = []
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("PLIMSOLL_HOME", str(home))
        monkeypatch.setattr(steps._Demo, "_build_binaries", self.reach("binaries"))
        monkeypatch.setattr(steps._Demo, "_prepare_model", self.reach("model"))
        monkeypatch.setattr(Cluster, "up", self.up)
        monkeypatch.setattr(Cluster, "down", lambda cluster: self.down(cluster))
        self.act("_play")

    def reach(self, name: str, act: Callable[[], None] = lambda: None) -> Callable[..., None]:
        def step(*_: object) -> None:
            act()
            self.log.append(name)

        return step

    def act(self, method: str, act: Callable[[], None] = lambda: None) -> None:
        step = self.reach(method, act)

        async def play(*_: object) -> list[str]:
            step()
            await asyncio.sleep(0)
            return []

        self._monkeypatch.setattr(steps._Demo, method, play if method == "_play" else step)

    def up(self, name: str, *_: object, tied: bool) -> Cluster:
        cluster = Cluster.find(name)
        cluster.directory.mkdir(parents=True)
        return cluster

    def down(self, cluster: Cluster) -> None:
        interrupt()
        cluster.directory.rmdir()
        self.log.append("down")


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stage:
    return Stage(monkeypatch, tmp_path)


def test_before_a_cluster(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.act("_prepare_model", interrupt)
    assert steps.run(steps.Options(name="none")) == 130
    assert stage.log == ["binaries"]
    assert capsys.readouterr().out.endswith("stopped before a cluster was started\n")


@pytest.mark.parametrize("keep", [False, True])
def test_on_a_cluster_and_once_more_while_it_ends(
    stage: Stage, capsys: pytest.CaptureFixture[str], keep: bool
) -> None:
    stage.act("_play", interrupt)
    assert steps.run(steps.Options(name="none", keep=keep)) == 130
    assert stage.log == ["binaries", "model", "_play", "down"]
    assert capsys.readouterr().out.endswith("stopped; the cluster is gone\n")


def test_what_could_not_be_ended_is_not_said_to_be_gone(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.act("_play", interrupt)
    monkeypatch.setattr(stage, "down", interrupt)
    assert steps.run(steps.Options(name="none")) == 130
    assert "some of the cluster is left: " in capsys.readouterr().out
