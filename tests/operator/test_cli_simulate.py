"""`kubectl plimsoll simulate`: a trace, a GPU and a model in, a report out; the simulator is real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plimsoll_operator.cli import simulate
from plimsoll_operator.cli.app import run
from support.model_configs import MODEL_CONFIGS

TRACE = "t_s,input_tokens,output_tokens\n" + "".join(f"{2 * n},400,20\n" for n in range(40))


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(
        json.dumps(MODEL_CONFIGS["qwen3-8b-yarn"]), encoding="utf-8"
    )
    return str(tmp_path / "config.json")


def test_a_trace_becomes_lines_and_a_report(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    trace, out = tmp_path / "mine.csv", tmp_path / "out.html"
    trace.write_text(TRACE, encoding="utf-8")
    call = ["simulate", "--trace", str(trace), "--gpu", "L40S", "--model", model]
    assert run([*call, "--seeds", "1", "--out", str(out)]) == 0
    printed = capfd.readouterr().out
    assert "40 requests" in printed
    assert "l40s-48gb" in printed
    assert "Plimsoll would move nothing" in printed
    assert "Simulated" in printed
    assert "<svg" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"--trace": "missing.csv"}, "missing.csv"),
        ({"--model": "nowhere.json"}, "--model nowhere.json: no such file"),
    ],
)
def test_bad_input_is_named_and_exits_with_2(
    change: dict[str, str], expected: str, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"--trace": "mine.csv", "--gpu": "L40S", "--model": model, **change}
    assert run(["simulate", *(word for pair in options.items() for word in pair)]) == 2
    assert expected in capfd.readouterr().err


def test_a_missing_extra_is_named(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulate, "find_spec", lambda name: None if name == "numpy" else name)
    assert run(["simulate", "--trace", "mine.csv", "--gpu", "L40S", "--model", model]) == 1
    assert "simulate needs numpy: install 'plimsoll[cli,simulator]'" in capsys.readouterr().err
