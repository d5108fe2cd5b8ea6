"""Programs out of Debian packages: found, unpacked without root, or missing with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll_local import debian_programs
from plimsoll_local.debian_programs import ensure_program, find_program
from plimsoll_local.go_build import MissingTool

# An apt that writes what it was asked, and a package that dpkg-deb "unpacks".
APT = """#!/bin/sh
echo "$@" >> "$PLIMSOLL_HOME/asked"
case "$*" in *download*) : > prometheus_2.0_any.deb;; esac
"""
DPKG = """#!/bin/sh
/bin/mkdir -p "$3/usr/bin" && echo made > "$3/usr/bin/promtool" && /bin/chmod +x "$3/usr/bin/promtool"
"""


def write_program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLIMSOLL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    (tmp_path / "home").mkdir()
    return tmp_path / "path"


def test_what_is_on_path_is_taken(path: Path) -> None:
    assert find_program("promtool") is None
    write_program(path, "promtool", "")
    assert ensure_program("promtool") == path / "promtool"
    # Debian names it after its package.
    write_program(path, "prometheus-alertmanager", "")
    assert ensure_program("alertmanager") == path / "prometheus-alertmanager"


def test_a_package_is_unpacked_once_and_nothing_else_stays(path: Path, tmp_path: Path) -> None:
    write_program(path, "apt-get", APT)
    write_program(path, "dpkg-deb", DPKG)
    first = ensure_program("promtool")
    assert first.read_text() == "made\n"
    assert ensure_program("promtool") == find_program("promtool") == first
    update, download = (tmp_path / "home" / "asked").read_text().splitlines()
    assert update.endswith("update")
    assert download.endswith("download prometheus")
    assert [entry.name for entry in (tmp_path / "home" / "debian").iterdir()] == ["prometheus"]


@pytest.mark.parametrize(
    ("apt", "reason"),
    [
        (None, "no apt-get"),
        ("#!/bin/sh\necho 'E: no way there' >&2\nexit 100\n", "exited 100: E: no way there"),
    ],
)
def test_what_is_not_to_be_had_is_said_and_ends_well(
    path: Path, apt: str | None, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_program(path, "dpkg-deb", DPKG)
    if apt is not None:
        write_program(path, "apt-get", apt)
    with pytest.raises(MissingTool, match=reason):
        ensure_program("promtool")
    assert debian_programs.main(["promtool"]) == 0
    said = capsys.readouterr().out
    assert "promtool is NOT to be had here" in said
    assert reason in said
