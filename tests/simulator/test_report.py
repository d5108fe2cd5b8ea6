"""The page and the lines of a report; devices and models by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plimsoll_simulator.app import app
from plimsoll_simulator.evaluation import Cell, Result, evaluate
from plimsoll_simulator.hardware import LLAMA_3_1_8B, UnknownHardware, find_hardware
from plimsoll_simulator.model_config import ModelError, read_model
from plimsoll_simulator.plots import draw_decisions
from plimsoll_simulator.report import build_page, describe
from plimsoll_simulator.timeline import read_timeline
from support.model_configs import LLAMA_3_70B

LLAMA_3_1_8B_CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


@pytest.fixture(scope="module")
def pressed(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """Half a minute of more than a small card can hold, and long prompts until five minutes."""
    folder = tmp_path_factory.mktemp("report")
    trace = folder / "mine.csv"
    times = [(0.25 * n, 3000) for n in range(120)] + [(10.0 * n, 20_000) for n in range(1, 30)]
    rows = "".join(f"{time},{prompt},200\n" for time, prompt in times)
    trace.write_text(f"t_s,input_tokens,output_tokens\n{rows}", encoding="utf-8")
    cells = [
        Cell(trace, 1.0, "B0", None, 290.0, "rtx4090-24gb", 1, 1.0, policy, 0)
        for policy in ("S2", "plimsoll")
    ]
    return evaluate(
        cells, cache_dir=folder / "kept", processes=1, progress=lambda result, cached: None
    )


def test_a_page_needs_nothing_but_itself(pressed: list[Result]) -> None:
    page = build_page(pressed)
    assert page.count("<svg") == 3
    assert not re.search(r"<(script|link|img|iframe)\b", page)
    assert not re.search(r"(src|href)=\"(?!#)", page)
    assert "Simulated" in page
    assert "maxModelLen" in page
    drawn = read_timeline(pressed[1].timeline)
    assert draw_decisions(drawn) == draw_decisions(drawn)


def test_lines_say_what_is_done_and_what_it_costs(pressed: list[Result]) -> None:
    lines = describe(pressed)
    assert lines[0].startswith("148 requests in 5 min")
    (doings,) = (line for line in lines if line.startswith("What Plimsoll would do"))
    assert "maxModelLen" in doings
    refused = pressed[1].summary["admissible_refused"]
    assert refused > 0
    assert any(f"{refused} in place of 0" in line for line in lines)


def test_a_timeline_has_every_change_and_the_worst_of_each_moment(pressed: list[Result]) -> None:
    timeline = read_timeline(pressed[1].timeline)
    assert len(timeline.points) <= 241
    lengths = [point.length for point in timeline.points]
    lowest = min(mark.after or 0 for mark in timeline.marks if mark.parameter == "maxModelLen")
    assert min(lengths) == lowest < max(lengths)
    assert all(0 < point.used <= 1 for point in timeline.points if point.used is not None)


def test_a_device_is_found_by_its_name_where_that_says_which() -> None:
    assert find_hardware("L40S") == find_hardware("L40S-48G") == find_hardware("l40s-48gb")
    with pytest.raises(UnknownHardware, match="expected one of a100-40gb, a100-80gb"):
        find_hardware("A100")


def test_a_model_has_the_sizes_of_its_config(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_3_1_8B_CONFIG), encoding="utf-8")
    found = read_model(file, LLAMA_3_1_8B.name)
    assert found.kv_bytes_per_token == LLAMA_3_1_8B.kv_bytes_per_token
    assert found.weight_bytes == pytest.approx(LLAMA_3_1_8B.weight_bytes, rel=0.001)
    assert found.native_length == LLAMA_3_1_8B.native_length
    file.write_text('{"model_type": "gpt2"}', encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json: model_type is gpt2; allowed: llama"):
        read_model(file, "other")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--gpu", "A100"], "--gpu is 'A100'"),
        (["--out", "nowhere/out.html"], "no folder"),
        (["--model-config", "BIG", "--gpu", "a10-24gb"], "the cache holds 0 tokens"),
    ],
)
def test_a_report_that_cannot_be_made_says_why(
    tmp_path: Path, options: list[str], expected: str
) -> None:
    trace, big = tmp_path / "mine.csv", tmp_path / "config.json"
    trace.write_text("t_s,input_tokens,output_tokens\n0,10,10\n", encoding="utf-8")
    big.write_text(json.dumps(LLAMA_3_70B), encoding="utf-8")
    given = [str(big) if option == "BIG" else option for option in options]
    shown = CliRunner().invoke(app, ["report", "--trace", str(trace), *given])
    assert shown.exit_code == 2
    assert expected in shown.output
