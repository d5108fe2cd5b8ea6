"""The native library is compiled once, kept for its owner alone, and done without where it cannot be."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from plimsoll_engine.native import library


@pytest.fixture(autouse=True)
def _unloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is loaded, and nothing lies beside the source."""
    source = tmp_path / "source" / library.SOURCE.name
    source.parent.mkdir()
    source.write_text(library.SOURCE.read_text())
    monkeypatch.setattr(library, "SOURCE", source)
    library.load_library.cache_clear()
    yield
    library.load_library.cache_clear()


def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "deep" / "native"
    made = library.ensure_compiled(folder)
    assert made.parent == folder
    assert os.listdir(folder) == [made.name]
    before = made.stat()
    assert library.ensure_compiled(folder) == made
    assert made.stat().st_ino == before.st_ino

    # What others could have written is not loaded, but made anew.
    made.chmod(0o777)
    assert library.ensure_compiled(folder) == made
    assert made.stat().st_ino != before.st_ino
    assert not made.stat().st_mode & 0o022


def test_a_place_that_cannot_be_written_is_no_reason_to_do_without(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    made = library.ensure_compiled(taken / "native")
    assert made.exists()
    assert tmp_path not in made.parents


def test_what_lies_beside_the_source_is_found(tmp_path: Path) -> None:
    made = library.ensure_compiled(library.SOURCE.parent)
    assert library.ensure_compiled(tmp_path / "cache") == made
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"PLIMSOLL_CPU_KERNELS": "torch"}, "PLIMSOLL_CPU_KERNELS=torch"),
        ({"CXX": "/nowhere/c++"}, "/nowhere/c++"),
        ({"CXX": "false"}, "a C++ compiler with OpenMP is needed"),
        ({"PATH": ""}, "no C++ compiler"),
    ],
)
def test_what_is_missing_is_told(
    environ: dict[str, str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO):
        assert library.load_library() is None
    assert told in caplog.text


def test_a_compiler_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = tmp_path / "c++"
    program.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no such thing" >&2\nexit 1\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(program))
    assert library.load_library() is None
    assert "no such thing" in caplog.text
    assert os.listdir(library.cache_folder()) == []
