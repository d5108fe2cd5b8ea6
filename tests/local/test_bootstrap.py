"""Setting a checkout up: what is missing is said plainly, what is there is not done again."""

import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from types import ModuleType

import pytest

from support.scripts import load_script

SOURCE = Path(__file__).parents[2] / "tools" / "bootstrap.py"
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, on a checkout and a cache of its own and with an empty PATH."""
    module = load_script(SOURCE)
    for name in ("uv.lock", "pyproject.toml"):
        (tmp_path / name).write_text(name)
    environment = tmp_path / ".venv"
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "ENVIRONMENT", environment)
    monkeypatch.setattr(module, "STAMP", environment / "bootstrap.json")
    monkeypatch.setattr(module, "BUILD", environment / "build.json")
    monkeypatch.setenv("PLIMSOLL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("UV", "")
    return module


def make_program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


# Makes what `uv sync` would, and counts how often.
UV = """case $1 in
--version) echo "uv 99.0.0" ;;
sync) /bin/mkdir -p .venv/bin; echo sync >> calls; /bin/cp python .venv/bin/python ;;
esac"""


def test_what_is_installed_is_not_installed_again(
    bootstrap: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_program(tmp_path / "path" / "uv", UV)
    make_program(tmp_path / "path" / "cc", "")
    # Stands for plimsoll_local.binaries, which builds in the first run only.
    make_program(
        tmp_path / "python",
        'if [ ! -e built ]; then echo \'{"downloads_s": 20, "builds_s": 300}\' > "$4"; : > built; fi',
    )
    assert bootstrap.main() == 0
    assert bootstrap.main() == 0
    assert (tmp_path / "calls").read_text() == "sync\n"
    # The second run built nothing, and the figures of the first stay.
    last = capsys.readouterr().out.splitlines()[-1]
    assert "20 s for downloads" in last
    assert "300 s for builds" in last
    (tmp_path / "uv.lock").write_text("changed")
    assert bootstrap.main() == 0
    assert (tmp_path / "calls").read_text() == "sync\nsync\n"


def test_a_failed_installation_is_tried_again(
    bootstrap: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_program(tmp_path / "path" / "uv", '[ "$1" = --version ] && echo uv 99.0.0')
    make_program(tmp_path / "path" / "cc", "")
    assert bootstrap.main() == 1
    assert "installing the locked environment" in capsys.readouterr().err
    assert not bootstrap.read_stamp()


def test_a_missing_compiler_is_named(
    bootstrap: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_program(tmp_path / "path" / "uv", UV)
    assert bootstrap.main() == 1
    assert "apt-get install gcc libc6-dev" in capsys.readouterr().err


def test_too_little_disk_is_named(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bootstrap.shutil, "disk_usage", lambda path: Usage(2**40, 2**40 - 2**30, 2**30)
    )
    with pytest.raises(bootstrap.Missing, match=r"15 GiB of disk are needed .* 1\.0 GiB are free"):
        bootstrap.check_disk()


def test_a_python_without_venv_is_named(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_program(tmp_path / "python", "exit 1")
    monkeypatch.setattr(sys, "executable", os.fspath(tmp_path / "python"))
    with pytest.raises(bootstrap.Missing, match="apt-get install python3-venv"):
        bootstrap.find_uv()


def test_an_old_uv_is_not_taken(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_program(tmp_path / "path" / "uv", "echo uv 0.4.1")
    cached = tmp_path / "home" / "uv" / bootstrap.UV_VERSION / "bin" / "uv"
    make_program(cached, f"echo uv {bootstrap.UV_VERSION}")
    assert bootstrap.find_uv() == cached
    make_program(tmp_path / "path" / "uv", "echo uv 99.1.0")
    assert bootstrap.find_uv() == tmp_path / "path" / "uv"


INTERRUPTED = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("bootstrap", sys.argv[1])
bootstrap = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bootstrap)
bootstrap.prepare = lambda: bootstrap.follow("working", ["./work"])
bootstrap.ROOT = Path.cwd()
sys.exit(bootstrap.main())
"""


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "one-process"])
def test_an_interrupt_ends_what_runs_with_one_line(tmp_path: Path, terminal: bool) -> None:
    """A terminal interrupts the command too, `kill -INT` this script alone."""
    make_program(
        tmp_path / "work",
        "trap '/bin/sleep 0.2; echo told >> told; exit 1' INT\n"
        "echo $$ > pid.draft; /bin/mv pid.draft pid\n"
        "while :; do /bin/sleep 0.1; done",
    )
    script = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, SOURCE],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    (os.killpg if terminal else os.kill)(script.pid, signal.SIGINT)
    _, error = script.communicate(timeout=60)
    assert script.returncode == 130
    assert error.strip() == "plimsoll: stopped; the next run goes on from here"
    assert (tmp_path / "told").read_text() == "told\n"
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
