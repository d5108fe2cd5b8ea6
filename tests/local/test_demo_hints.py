"""What is printed to be typed runs as it is printed, in the environment of a newcomer."""

import shlex
import sys
from pathlib import Path

import pytest

from plimsoll_local.demo.hints import describe_play, find_kubectl, find_program


def test_the_program_is_named_by_a_path_that_runs_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "check out" / ".venv"))
    monkeypatch.chdir(tmp_path)
    assert str(find_program()) == "check out/.venv/bin/plimsoll-local"
    (tmp_path / "check out").mkdir()
    monkeypatch.chdir(tmp_path / "check out")
    assert str(find_program()) == ".venv/bin/plimsoll-local"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert find_program() == tmp_path / "check out" / ".venv" / "bin" / "plimsoll-local"


def test_kubectl_has_its_path_where_none_is_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = tmp_path / "built" / "kubectl"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_kubectl(built) == built
    (tmp_path / "kubectl").touch(mode=0o755)
    assert find_kubectl(built) == Path("kubectl")


def test_every_line_is_a_command_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(sys.prefix).parent)
    export, *commands = describe_play("c", Path("/a b"), Path(sys.executable), "default/chat:80")
    assert shlex.split(export) == ["export", "KUBECONFIG=/a b"]
    words = [shlex.split(line, comments=True) for line in commands]
    assert [line[1:] for line in words] == [
        ["get", "llmd"],
        ["describe", "llmd", "chat"],
        ["proxy", "--name", "c", "default/chat:80"],
        ["down", "--name", "c"],
    ]
    assert all(Path(line[0]).is_file() for line in words)
