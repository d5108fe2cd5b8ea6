"""The native kernels against their plain-torch twins."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll_engine.kv_cache import CpuKVCache
from plimsoll_engine.layer_ops import TORCH_OPS, native_ops
from plimsoll_engine.native.library import find_compiler
from plimsoll_engine.native.ops import NativeKernels, find_kernels
from plimsoll_engine.reference.kv_write import kv_write as write_by_torch
from plimsoll_engine.reference.paged_attention import paged_attention as attend_by_torch
from support.kernel_cases import (
    CASES,
    LAYER,
    WRITE_CASES,
    KernelCase,
    largest_difference,
    layout_of,
    make_inputs,
    unseen_slots,
)
from support.layer_op_cases import compute

BF16, F32 = torch.bfloat16, torch.float32
# bfloat16: the twin rounds the softmax weights; both round the result, of values up to 4.
TOLERANCE = {F32: 2e-6, BF16: 4e-2}


def has_compiler() -> bool:
    try:
        return bool(find_compiler())
    except OSError:
        return False


def kernels_of(dtype: torch.dtype) -> NativeKernels:
    kernels = find_kernels(dtype)
    if kernels is None and not has_compiler():
        pytest.skip("there is no C++ compiler here")
    assert kernels is not None
    return kernels


def in_types(cases: tuple[KernelCase, ...]) -> list[KernelCase]:
    """Each in both types that have native kernels."""
    return [
        replace(case, name=f"{case.name}-{name}", dtype=dtype)
        for case in cases
        for name, dtype in (("f32", F32), ("bf16", BF16))
    ]


def empty_cache(case: KernelCase, num_blocks: int) -> CpuKVCache:
    layout = layout_of(case)
    cache = CpuKVCache(layout, 2 * num_blocks * layout.bytes_per_block)
    cache.resize(num_blocks)
    return cache


def difference(case: KernelCase) -> float:
    """Between what kernel and twin attend to, of keys and values that the twin has written."""
    inputs = make_inputs(case)
    cache = empty_cache(case, inputs.num_blocks)
    write_by_torch(inputs.key, inputs.value, cache, LAYER, inputs.slots)
    unseen = unseen_slots(case, inputs)
    nothing = torch.full((len(unseen), *inputs.key.shape[1:]), math.nan, dtype=case.dtype)
    write_by_torch(nothing, nothing, cache, LAYER, unseen)
    arguments = (inputs.query, cache, LAYER, inputs.batch, case.head_size**-0.5)
    limits = (case.sliding_window, case.soft_cap)
    expected = attend_by_torch(*arguments, *limits)
    # Of an empty cache both would agree.
    assert expected.abs().amax((1, 2)).min() > 1e-3
    return largest_difference(kernels_of(case.dtype).paged_attention(*arguments, *limits), expected)


@pytest.mark.parametrize("case", in_types(CASES), ids=lambda case: case.name)
def test_attention_is_that_of_the_twin(case: KernelCase) -> None:
    assert difference(case) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("case", in_types(WRITE_CASES), ids=lambda case: case.name)
def test_keys_and_values_are_written_where_they_belong(case: KernelCase) -> None:
    inputs = make_inputs(case)
    mine, theirs = (empty_cache(case, inputs.num_blocks) for _ in range(2))
    kernels_of(case.dtype).kv_write(inputs.key, inputs.value, mine, LAYER, inputs.slots)
    write_by_torch(inputs.key, inputs.value, theirs, LAYER, inputs.slots)
    assert mine.rows.abs().max() > 0
    assert torch.equal(mine.rows[: len(mine.rows) // 2], theirs.rows[: len(theirs.rows) // 2])


@st.composite
def cases(draw: st.DrawFn) -> KernelCase:
    """Any shapes: groups of heads that fill no tile, odd head sizes, contexts around tiles."""
    kv_heads = draw(st.integers(1, 3))
    sequences = st.tuples(st.integers(1, 90), st.integers(0, 150))
    return KernelCase(
        "drawn",
        kv_heads * draw(st.sampled_from((1, 2, 3, 5, 8, 71))),
        kv_heads,
        draw(st.sampled_from((8, 16, 20, 64, 80, 96, 128, 130, 256))),
        draw(st.sampled_from((16, 32, 48))),
        draw(st.sampled_from((F32, BF16))),
        tuple((new, new + old) for new, old in draw(st.lists(sequences, min_size=1, max_size=3))),
        draw(st.sampled_from((None, 1, 7, 64, 65))),
        draw(st.sampled_from((None, None, 2.5))),
    )


@settings(max_examples=60, deadline=None)
@given(cases())
def test_attention_of_any_shape_is_that_of_the_twin(case: KernelCase) -> None:
    # Differences of float32 grow with the number of keys.
    assert difference(case) < 3 * TOLERANCE[case.dtype]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_small_kernels_are_their_twins(dtype: torch.dtype) -> None:
    mine, theirs = compute(native_ops(kernels_of(dtype)), dtype), compute(TORCH_OPS, dtype)
    assert set(mine) == set(theirs)
    for name, result in mine.items():
        assert result.dtype == dtype
        # The twin rounds in the midst of turning; the sums of norms are taken in another order.
        allowed = {F32: 2e-6, BF16: 2**-6}[dtype] * theirs[name].abs().float().clamp_min(1.0)
        assert bool(((result.float() - theirs[name].float()).abs() <= allowed).all()), name


def test_what_is_no_number_stays_none() -> None:
    """A fault in the weights must not become an answer."""
    for dtype in (F32, BF16):
        ops = native_ops(kernels_of(dtype))
        rows = torch.ones((2, 40), dtype=dtype)
        rows[0, 3] = math.nan
        for result in (
            ops.rms_norm(rows, torch.ones(40, dtype=dtype), 1e-5),
            ops.add_rms_norm(rows, rows, torch.ones(40, dtype=dtype), 1e-5)[1],
            ops.silu_and_mul(rows),
        ):
            assert bool(result[0].isnan().any())
            assert not bool(result[1].isnan().any())


def test_rows_that_belong_to_nobody_store_and_read_nothing() -> None:
    """As in a recorded batch with fewer sequences than it was recorded for."""
    for dtype in (F32, BF16):
        case = KernelCase("nobody", 2, 1, 16, 16, dtype, ((1, 5), (1, 1)))
        inputs = make_inputs(case)
        cache = empty_cache(case, inputs.num_blocks)
        kernels_of(dtype).kv_write(
            inputs.key[:2], inputs.value[:2], cache, LAYER, torch.tensor([-1, -1])
        )
        assert not bool(cache.rows.any())
        write_by_torch(inputs.key, inputs.value, cache, LAYER, inputs.slots)
        batch = replace(
            inputs.batch,
            context_lens=(5, 0),
            context_lens_tensor=torch.tensor([5, 0], dtype=torch.int32),
        )
        found = kernels_of(dtype).paged_attention(inputs.query, cache, LAYER, batch, 0.25)
        assert bool(found[0].any())
        assert not bool(found[1].any())


def test_half_precision_has_no_native_kernels() -> None:
    assert find_kernels(torch.float16) is None
