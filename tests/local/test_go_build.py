"""Building Go programs, with a toolchain that is a shell script."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from plimsoll_local import go_build
from plimsoll_local.go_build import Estimate, GoBuild, MissingTool, Program

APPLE = Program("apple", "fruit", "example.org/apple", "-s", (1,), cold_s=30)
PEAR = Program("pear", "fruit", "example.org/pear", "-s", (1,), cold_s=10)

# Lists three packages for what it downloads two modules for; writes its output file; `bad` fails.
GO = """#!/bin/sh
for last in "$@"; do :; done
case "$1:$last" in
version:*) echo go version go1.26.1 linux/amd64 ;;
*/bad) echo "$last: no such package" >&2; exit 1 ;;
list:*) echo "go: downloading a v1" >&2; echo "go: downloading b v1" >&2; printf 'a\\nb\\nc\\n' ;;
build:*)
  [ -f go.mod ] && [ "$GOFLAGS$GOWORK$GOTOOLCHAIN" = "-mod=readonlyofflocal" ] || exit 3
  while [ "$1" != -o ]; do shift; done
  echo "$last" > "$2" ;;
esac
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    go = tmp_path / "path" / "go"
    go.parent.mkdir()
    go.write_text(GO)
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{go.parent}:/usr/bin:/bin")
    module = tmp_path / "modules" / "fruit"
    module.mkdir(parents=True)
    (module / "go.mod").write_text("module fruit\n\nrequire (\n\ta v1\n\tb v1 // indirect\n)\n")
    return module.parent


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


def test_programs_are_put_there_and_nothing_else_is_left(
    modules: Path, target: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    GoBuild(modules, tmp_path / "home", said.append).run([APPLE, PEAR], target)
    assert (target / "apple").read_text() == "example.org/apple\n"
    assert sorted(path.name for path in target.iterdir()) == ["apple", "pear"]
    assert not list((tmp_path / "home" / "build").iterdir())
    assert said[0] == "[1/2] apple: building"
    assert said[1].startswith("[1/2] apple: built in ")


def test_a_failed_download_says_why_and_puts_nothing_there(
    modules: Path, target: Path, tmp_path: Path
) -> None:
    bad = Program("bad", "fruit", "example.org/bad", "-s", (1,), cold_s=1)
    build = GoBuild(modules, tmp_path / "home", lambda line: None)
    with pytest.raises(MissingTool, match=r"GOPROXY.*example.org/bad: no such package"):
        build.run([APPLE, bad], target)
    assert not list(target.iterdir())


def test_an_interrupt_ends_go_and_leaves_no_draft(
    modules: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "path" / "go"
    waits = "  trap 'echo told > ../../../told; exit 1' INT; echo half > \"$2\"; echo going\n"
    waits += "  while :; do sleep 0.1; done ;;\n"
    slow.write_text(GO.replace('  echo "$last" > "$2" ;;\n', waits))
    monkeypatch.setattr(go_build, "REPORT_INTERVAL_S", 0.5)

    def interrupt(line: str) -> None:
        if "1 of at most" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GoBuild(modules, tmp_path / "home", interrupt).run([APPLE], target)
    assert (tmp_path / "told").exists()
    assert not list(target.iterdir())


def test_what_is_left_follows_the_proportions_and_the_pace() -> None:
    times: Iterator[float] = iter([0.0, 30.0, 90.0])
    estimate = Estimate([APPLE, PEAR], lambda: next(times))
    # Nothing done yet: the measured time on two cores.
    assert estimate.seconds_left(APPLE, 0.0) == 40
    # Half of the apple is 15 of 40 and took 30 s.
    assert estimate.seconds_left(APPLE, 0.5) == pytest.approx(50)
    estimate.finish(APPLE)
    assert estimate.seconds_left(PEAR, 0.0) == pytest.approx(30)
