"""bench/gpu.py runs from end to end in its smoke mode, and judges figures as its goals say."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu import Verdict, judge, section_names
from gpu_engine import roofline_seconds
from gpu_scale import FULL, LLAMA_8B, QWEN3_0_6B, SMOKE, Workload, nano_vllm_workload

SCRIPT = Path(__file__).parents[1] / "bench" / "gpu.py"
# As `make bench-gpu` does: a script's own folder may be kept off the path.
ENVIRON = {**os.environ, "PYTHONPATH": str(SCRIPT.parent)}


# Nine processes that import torch: a minute of a free core.
@pytest.mark.timeout(900)
def test_a_smoke_run_has_every_section_and_every_figure(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--smoke", "--minutes", "14", "--json", str(file)],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRON,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(file.read_text())
    assert document["smoke"] is True
    sections = {name: section["result"] for name, section in document["sections"].items()}
    assert list(sections) == section_names(SMOKE)
    assert all(0.0 < row["share_of_copy"] < math.inf for row in sections["decode"])
    assert all(0.0 < row["share_of_sdpa"] < math.inf for row in sections["prefill"])
    assert {row["enforce_eager"] for row in sections["overhead"]} == {False, True}
    assert sections["resize"]["given_back_share"] > 0.9
    assert sections["serve-tiny"]["output_tokens_per_second"] > 0.0
    for arm in ("pinned", "tuned"):
        found = sections[f"burst-{arm}"]
        assert found["answered"] == SMOKE.burst.requests, found
        assert (found["failure"], found["allocation_failures_caught"]) == (None, 0)
    # What the goals need is there, also where they are not judged.
    assert all(
        isinstance(own, Verdict) for name, row in sections.items() for own in judge(name, row)
    )


def test_the_workload_is_nano_vllms() -> None:
    workload = nano_vllm_workload()
    assert (len(workload.prompts), workload.input_tokens) == (256, 142_827)
    assert workload.output_tokens == 133_966


def test_the_roofline_counts_weights_cache_and_prompts() -> None:
    workload = Workload(prompts=((1,) * 10, (1,) * 20), outputs=(2, 3))
    parameters, kv = LLAMA_8B.parameters, LLAMA_8B.kv_bytes(2)
    # Before the tokens: 10 + 11, 20 + 21 + 22 positions; the longest output has three steps.
    bytes_read = 3 * parameters * 2 + (21 + 63) * kv
    expected = bytes_read / 1e12 + 2 * parameters * 30 / 1e15
    assert roofline_seconds(LLAMA_8B, workload, 2, 1e12, 1e15) == pytest.approx(expected)


def test_shapes_have_the_published_sizes() -> None:
    assert LLAMA_8B.parameters == pytest.approx(8.03e9, rel=0.001)
    assert LLAMA_8B.kv_bytes(2) == 128 * 1024
    assert QWEN3_0_6B.parameters == pytest.approx(0.596e9, rel=0.001)


@pytest.mark.parametrize(
    ("name", "result", "held"),
    [
        ("decode", [{"batch": 64, "context": 1024, "share_of_copy": 0.75}], [True]),
        ("decode", [{"batch": 64, "context": 4096, "share_of_copy": 0.74}], [False]),
        ("decode", [{"batch": 1, "context": 16384, "share_of_copy": 0.1}], []),
        ("prefill", [{"length": 4096, "share_of_sdpa": 0.49}], [False]),
        ("serve-Llama-8B", {"share_of_roofline": 0.5}, [True]),
        ("burst-pinned", {"allocation_failures_caught": 3, "failure": "gone"}, []),
        ("burst-tuned", {"allocation_failures_caught": 0, "failure": None}, [True]),
        ("burst-tuned", {"allocation_failures_caught": 1, "failure": None}, [False]),
        ("burst-tuned", {"allocation_failures_caught": 0, "failure": "gone"}, [False]),
    ],
)
def test_goals(name: str, result: object, held: list[bool]) -> None:
    assert [own.held for own in judge(name, result)] == held


def test_an_unknown_section_is_named_with_those_that_there_are() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--sections", "decode,speed"],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRON,
    )
    assert done.returncode == 2
    assert "speed; allowed: device, decode" in done.stderr


def test_the_child_knows_every_section() -> None:
    from gpu import measures

    for scale in (SMOKE, FULL):
        assert list(measures(scale, {})) == section_names(scale)
