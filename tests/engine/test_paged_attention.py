"""Paged attention: the plain-torch twin against the textbook, the kernels against the twin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plimsoll_engine.kv_cache import CpuKVCache
from plimsoll_engine.reference import paged_attention as reference
from plimsoll_engine.reference.kv_write import kv_write
from support.kernel_cases import (
    BFLOAT16_CASE,
    CASES,
    LAYER,
    KernelCase,
    KernelInputs,
    layout_of,
    make_inputs,
)

TESTS = Path(__file__).parents[1]
# float16 and bfloat16 round the softmax weights and the result.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}

LONG_CASES = (
    KernelCase("decode", 9, 3, 64, 16, torch.float32, ((1, 1023), (1, 17), (1, 600), (1, 580))),
    KernelCase("prefill", 9, 3, 64, 16, torch.float32, ((1023, 1023),)),
    KernelCase("prefill-tiles", 4, 2, 64, 32, torch.float32, ((257, 900), (512, 512), (2, 256))),
)


def textbook_attention(case: KernelCase, inputs: KernelInputs) -> torch.Tensor:
    """softmax(QK^T) V of each sequence by itself, in float64."""
    results = []
    query_start = context_start = 0
    for queries, context in case.sequences:
        query = inputs.query[query_start : query_start + queries].double()
        key = inputs.key[context_start : context_start + context].double()
        value = inputs.value[context_start : context_start + context].double()
        group = case.num_heads // case.num_kv_heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * case.head_size**-0.5
        visible = torch.ones(queries, context).tril(context - queries).bool()
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        results.append(torch.einsum("hqk,khd->qhd", weights, value))
        query_start += queries
        context_start += context
    return torch.cat(results)


def twin_attention(case: KernelCase, inputs: KernelInputs) -> torch.Tensor:
    layout = layout_of(case, blocks_per_segment=64)
    cache = CpuKVCache(layout, (inputs.num_blocks + 64) * layout.bytes_per_block)
    cache.resize(inputs.num_blocks)
    kv_write(inputs.key, inputs.value, cache, LAYER, inputs.slots)
    return reference.paged_attention(inputs.query, cache, LAYER, inputs.batch, case.head_size**-0.5)


@pytest.mark.parametrize("case", [*CASES, *LONG_CASES, BFLOAT16_CASE], ids=lambda case: case.name)
def test_twin_is_textbook_attention(case: KernelCase) -> None:
    inputs = make_inputs(case)
    difference = (twin_attention(case, inputs) - textbook_attention(case, inputs)).abs().max()
    assert difference < TOLERANCE[case.dtype]


def test_twin_bounds_what_it_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes beyond the bound go in several groups, and the result is the same."""
    case = replace(LONG_CASES[0], sequences=((1, 100),) * 7)
    inputs = make_inputs(case)
    whole = twin_attention(case, inputs)
    row_bytes = layout_of(case).row_elements * 4
    monkeypatch.setattr(reference, "GATHER_BYTES", 2 * 7 * row_bytes)
    plan = reference.plan_gather(inputs.batch, layout_of(case), torch.float32)
    assert [len(group.queries) for group in plan.decodes] == [2, 2, 2, 1]
    torch.testing.assert_close(twin_attention(case, inputs), whole)


def test_short_contexts_are_not_padded_to_long_ones() -> None:
    case = LONG_CASES[0]
    plan = reference.plan_gather(make_inputs(case).batch, layout_of(case), torch.float32)
    assert [group.queries.tolist() for group in plan.decodes] == [[0, 2, 3], [1]]


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, float]]:
    """What ``support.kernel_cases`` measured under the interpreter."""
    result = subprocess.run(
        [sys.executable, "-m", "support.kernel_cases"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(TESTS)},
        check=True,
        capture_output=True,
        text=True,
    )
    measured: dict[str, dict[str, float]] = json.loads(result.stdout)
    return measured


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_agree_with_their_twins(
    case: KernelCase, interpreted: dict[str, dict[str, float]]
) -> None:
    measured = interpreted[case.name]
    assert measured["write"] == 0.0
    assert measured["elsewhere"] == 0.0
    assert measured["attention"] < TOLERANCE[case.dtype]
