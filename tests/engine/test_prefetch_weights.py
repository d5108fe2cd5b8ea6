"""The process that fills the cache ends with the words that the operator reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plimsoll_engine import prefetch
from plimsoll_engine.models.source import ModelSource


def test_a_model_that_cannot_be_had_ends_in_a_termination_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    monkeypatch.setenv("TERMINATION_LOG_PATH", str(log))
    assert prefetch.main(["--model", "no/such/name"]) == 1
    said = json.loads(log.read_text())
    assert said["class"] == "ModelLoadFailed"
    assert "no/such/name" in said["message"]
    assert json.loads(capsys.readouterr().err.splitlines()[-1]) == said


def test_a_model_that_is_there_ends_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def resolve(model: str, revision: str | None) -> ModelSource:
        asked.append((model, revision))
        return ModelSource(tmp_path, revision="abc")

    monkeypatch.setattr(prefetch, "resolve_model", resolve)
    assert prefetch.main(["--model", "org/tiny", "--revision", "v1"]) == 0
    assert asked == [("org/tiny", "v1")]
    assert "abc" in capsys.readouterr().out
