"""The plain-torch twin of paged attention against the textbook."""

from __future__ import annotations

from dataclasses import replace

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

# float16 and bfloat16 round the softmax weights and the result.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}

LONG_CASES = (
    KernelCase("decode", 9, 3, 64, 16, torch.float32, ((1, 1023), (1, 17), (1, 600), (1, 580))),
    KernelCase("prefill", 9, 3, 64, 16, torch.float32, ((1023, 1023),)),
    KernelCase("prefill-tiles", 4, 2, 64, 32, torch.float32, ((257, 900), (512, 512), (2, 256))),
    KernelCase("window-tiles", 4, 2, 64, 32, torch.float32, ((257, 900), (512, 512), (2, 256)), 70),
    KernelCase("window-decode", 9, 3, 64, 16, torch.float32, ((1, 1023), (1, 17), (1, 60)), 33),
    KernelCase("window-of-all", 4, 2, 64, 16, torch.float32, ((1, 40), (300, 301)), 4096),
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
        if case.soft_cap is not None:
            scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
        visible = torch.ones(queries, context).tril(context - queries).bool()
        if case.sliding_window is not None:
            visible = visible.triu(context - queries - case.sliding_window + 1)
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
    return reference.paged_attention(
        inputs.query,
        cache,
        LAYER,
        inputs.batch,
        case.head_size**-0.5,
        case.sliding_window,
        case.soft_cap,
    )


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


def test_blocks_before_the_window_are_not_gathered() -> None:
    case = replace(LONG_CASES[0], sequences=((1, 1023), (1, 33), (20, 400)), sliding_window=32)
    inputs = make_inputs(case)
    plan = reference.plan_gather(inputs.batch, layout_of(case), torch.float32, 32)
    # Positions 991 to 1022 lie in three blocks of 16, positions 1 to 32 also.
    assert [group.queries.tolist() for group in plan.decodes] == [[0, 1]]
    assert len(plan.decodes[0].key_rows) == 2 * 3
    # Query 380 sees from 349 on.
    assert plan.prefills[0].first_key == 336
    assert len(plan.prefills[0].key_rows) == 400 // 16 - 336 // 16


def test_short_contexts_are_not_padded_to_long_ones() -> None:
    case = LONG_CASES[0]
    plan = reference.plan_gather(make_inputs(case).batch, layout_of(case), torch.float32)
    assert [group.queries.tolist() for group in plan.decodes] == [[0, 2, 3], [1]]
