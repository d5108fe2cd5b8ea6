"""Cases for the kernels, and a program that runs them all under Triton's interpreter.

``python -m support.kernel_cases`` with TRITON_INTERPRET=1 prints, as JSON, for each case how far
kernel and plain-torch twin are apart (NaN where one of them is). It is a process of its own because Triton decides at import
whether kernels are interpreted.
"""

from __future__ import annotations

import ctypes
import json
import math
from dataclasses import dataclass

import torch

from plimsoll_engine.attention_batch import AttentionBatch, build_attention_batch
from plimsoll_engine.kv_cache import CudaKVCache, KVCache, KVLayout
from plimsoll_engine.reference.kv_write import store, token_rows

NUM_LAYERS = 2
LAYER = 1


@dataclass(frozen=True)
class KernelCase:
    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    # (query tokens, context length) of each sequence.
    sequences: tuple[tuple[int, int], ...]
    sliding_window: int | None = None
    soft_cap: float | None = None


def _around(block: int) -> tuple[tuple[int, int], ...]:
    """Decodes at the lengths where blocks begin and end."""
    return tuple((1, length) for length in (1, block - 1, block, block + 1, 33))


# Small on purpose: the interpreter takes about a tenth of a millisecond for every operation of
# every tile of every program, whatever its size.
F16, F32 = torch.float16, torch.float32
CASES = (
    KernelCase("decode-block16", 3, 1, 64, 16, F32, _around(16)),
    KernelCase("decode-block32-fp16", 4, 2, 64, 32, F16, ((1, 31), (1, 33))),
    KernelCase("decode-block48-head80", 2, 2, 80, 48, F32, ((1, 47), (1, 49))),
    KernelCase("decode-24-heads-of-96", 24, 1, 96, 16, F32, ((1, 40),)),
    # More than one tile for a split, and splits without any.
    KernelCase("decode-long", 2, 1, 64, 16, F32, ((1, 283), (1, 5))),
    KernelCase("decode-window", 2, 1, 64, 16, F32, ((1, 101), (1, 20)), 20),
    KernelCase("decode-window-of-1", 1, 1, 64, 16, F32, ((1, 33),), 1),
    KernelCase("decode-cap-fp16", 2, 1, 128, 16, F16, ((1, 37),), 36, 1.5),
    KernelCase("prefill", 3, 1, 64, 16, F32, ((16, 16), (1, 1), (33, 33))),
    KernelCase("prefill-later-chunk", 3, 1, 64, 16, F32, ((7, 40), (15, 64), (17, 18))),
    KernelCase("prefill-head256", 2, 1, 256, 16, F32, ((21, 45),)),
    KernelCase("prefill-window", 3, 1, 64, 16, F32, ((9, 90), (12, 12), (40, 41)), 11),
    KernelCase("prefill-cap", 1, 1, 64, 16, F32, ((18, 20),), None, 2.0),
    KernelCase("mixed", 8, 2, 64, 32, F32, ((1, 33), (11, 47), (1, 1))),
    KernelCase("mixed-window-cap-fp16", 3, 1, 64, 16, F16, ((1, 70), (11, 77), (1, 16)), 18, 3.0),
)

# Every token and KV head is a program of its own, so few of them.
WRITE_CASES = (
    KernelCase("write-block16", 2, 2, 64, 16, F32, ((1, 17), (3, 5))),
    KernelCase("write-block48-head80-fp16", 1, 1, 80, 48, F16, ((50, 50),)),
)

# For the twin alone: the interpreter multiplies bfloat16 matrices by their bit patterns (in a
# kernel of one tl.dot as well), so there bfloat16 kernels are only compiled.
BFLOAT16_CASE = KernelCase("mixed-bf16", 8, 2, 128, 16, torch.bfloat16, ((1, 17), (9, 70)))


@dataclass(frozen=True)
class KernelInputs:
    query: torch.Tensor
    # Of all context positions, sequence after sequence.
    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    batch: AttentionBatch
    num_blocks: int


def make_inputs(case: KernelCase) -> KernelInputs:
    """Random values; each sequence's blocks are scattered over the pool."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    size = case.block_size
    counts = [math.ceil(context / size) for _, context in case.sequences]
    spare = 3
    scattered = torch.randperm(sum(counts) + spare, generator=generator).tolist()
    tables = [[scattered.pop() for _ in range(count)] for count in counts]
    slots = [
        table[position // size] * size + position % size
        for table, (_, context) in zip(tables, case.sequences, strict=True)
        for position in range(context)
    ]
    queries = sum(query for query, _ in case.sequences)
    return KernelInputs(
        query=random(queries, case.num_heads, case.head_size),
        key=random(len(slots), case.num_kv_heads, case.head_size),
        value=random(len(slots), case.num_kv_heads, case.head_size),
        slots=torch.tensor(slots),
        batch=build_attention_batch(
            [query for query, _ in case.sequences],
            [context for _, context in case.sequences],
            tables,
            torch.device("cpu"),
        ),
        num_blocks=sum(counts) + spare,
    )


def layout_of(case: KernelCase, blocks_per_segment: int = 3) -> KVLayout:
    return KVLayout(
        NUM_LAYERS,
        case.num_kv_heads,
        case.head_size,
        case.block_size,
        case.dtype,
        blocks_per_segment,
    )


def segmented_cache(case: KernelCase, num_blocks: int) -> KVCache:
    """Segments in tensors of their own, as on CUDA."""
    layout = layout_of(case)
    cache = CudaKVCache(layout, 2 * num_blocks * layout.bytes_per_block, torch.device("cpu"))
    cache.resize(num_blocks)
    return cache


def fill(cache: KVCache, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes without the kernel. ``rows`` is a copy of the segments, so it is copied back."""
    rows = cache.rows
    store(key, value, rows, cache.layout, LAYER, token_rows(cache.layout, slots))
    size = cache.layout.segment_bytes
    addresses = cache.segment_table[: rows.nbytes // size].tolist()
    for index, address in enumerate(addresses):
        ctypes.memmove(address, rows.data_ptr() + index * size, size)


def unseen_slots(case: KernelCase, inputs: KernelInputs) -> torch.Tensor:
    """Those before every window, up to the tile or block that it begins in."""
    unit = math.lcm(32, case.block_size)
    unseen: list[int] = []
    start = 0
    for queries, context in case.sequences:
        first = context - queries - (case.sliding_window or context) + 1
        unseen.extend(range(start, start + max(0, first // unit * unit)))
        start += context
    return inputs.slots[unseen]


def poison(case: KernelCase, inputs: KernelInputs, cache: KVCache) -> None:
    """Puts NaN where nothing is seen: even with weight 0, a result of what was read there is NaN."""
    unseen = unseen_slots(case, inputs)
    shape = (len(unseen), case.num_kv_heads, case.head_size)
    nothing = torch.full(shape, torch.nan, dtype=case.dtype)
    fill(cache, nothing, nothing, unseen)


def run_write(case: KernelCase) -> dict[str, float]:
    """Largest differences of what is at the slots, and of everything else from zero."""
    from plimsoll_engine.ops.kv_write import kv_write

    inputs = make_inputs(case)
    cache = segmented_cache(case, inputs.num_blocks)
    kv_write(inputs.key, inputs.value, cache, LAYER, inputs.slots)
    # [segments, layers, 2, blocks, block_size, kv_heads, head_size]
    rows = cache.rows.view(-1, *layout_of(case).segment_shape)
    by_slot = rows.permute(1, 2, 0, 3, 4, 5, 6).flatten(2, 4).clone()
    stored = by_slot[LAYER][:, inputs.slots]
    by_slot[LAYER][:, inputs.slots] = 0
    return {
        "write": largest_difference(stored, torch.stack([inputs.key, inputs.value])),
        "elsewhere": float(by_slot.abs().max()),
    }


def run_case(case: KernelCase) -> dict[str, float]:
    """Largest differences between kernels and twins; "whole" where the launcher chose splits."""
    from plimsoll_engine.ops.paged_attention import paged_attention, whole_attention
    from plimsoll_engine.ops.split_attention import is_split
    from plimsoll_engine.reference.paged_attention import paged_attention as twin

    inputs = make_inputs(case)
    cache = segmented_cache(case, inputs.num_blocks)
    fill(cache, inputs.key, inputs.value, inputs.slots)
    poison(case, inputs, cache)
    arguments = (inputs.query, cache, LAYER, inputs.batch, case.head_size**-0.5)
    limits = (case.sliding_window, case.soft_cap)
    expected = twin(*arguments, *limits)
    # Of an empty cache all would agree.
    if not expected.abs().amax((1, 2)).min() > 0.01:
        raise ValueError(f"{case.name} compares nothing: {expected}")
    chosen = paged_attention(*arguments, *limits)
    result = {"attention": largest_difference(chosen, expected)}
    if is_split(inputs.batch, case.num_kv_heads):
        result["whole"] = largest_difference(whole_attention(*arguments, *limits), expected)
    return result


def run_nobody() -> dict[str, float]:
    """Rows that fill up a recorded batch (step_graphs.py): the largest value that they are given,
    how far the other rows are from the twin, and what is stored for a slot below 0."""
    from plimsoll_engine.ops.kv_write import kv_write
    from plimsoll_engine.ops.paged_attention import whole_attention
    from plimsoll_engine.ops.split_attention import split_attention
    from plimsoll_engine.reference.paged_attention import paged_attention as twin

    case = KernelCase("nobody", 3, 1, 64, 16, F32, ((1, 17), (1, 40)))
    inputs, owned, rows = make_inputs(case), len(case.sequences), 5
    cache = segmented_cache(case, inputs.num_blocks)
    slots = torch.full((len(inputs.slots),), -1)
    kv_write(inputs.key, inputs.value, cache, LAYER, slots)
    found = {"stored": float(cache.rows.abs().max()), "given": 0.0, "owned": 0.0}
    fill(cache, inputs.key, inputs.value, inputs.slots)
    query = torch.randn(rows, case.num_heads, case.head_size)
    query[:owned] = inputs.query
    tables = torch.zeros((rows, inputs.batch.block_tables.shape[1]), dtype=torch.int32)
    tables[:owned] = inputs.batch.block_tables
    batch = AttentionBatch(
        (1,) * rows,
        (0,) * rows,
        tables,
        torch.arange(rows + 1, dtype=torch.int32),
        torch.tensor([17, 40, 0, 0, 0], dtype=torch.int32),
    )
    for window in (None, 20):
        expected = twin(inputs.query, cache, LAYER, inputs.batch, 0.125, window)
        for attention in (whole_attention, split_attention):
            out = attention(query, cache, LAYER, batch, 0.125, window)
            found["given"] += float(out[owned:].abs().max())
            found["owned"] += largest_difference(out[:owned], expected)
    return found


def run_splits() -> dict[str, float]:
    """Which split of a window's is the last that saw anything; and how far the second pass is from
    its twin when splits that saw nothing hold NaN."""
    from plimsoll_engine.ops.split_attention import attend_splits, reduce_splits
    from plimsoll_engine.reference.split_attention import SplitResults
    from plimsoll_engine.reference.split_attention import reduce_splits as twin

    case = KernelCase("window", 2, 1, 64, 16, F32, ((1, 101),), 20)
    inputs = make_inputs(case)
    cache = segmented_cache(case, inputs.num_blocks)
    fill(cache, inputs.key, inputs.value, inputs.slots)
    found = attend_splits(inputs.query, cache, LAYER, inputs.batch, 0.125, 20, None)
    filled = (found.maxima > -math.inf).all(1)[0]
    partials = found.partials.masked_fill(~filled[:, None], math.nan)
    results = SplitResults(partials, found.maxima, found.sums)
    mine, theirs = reduce_splits(results, F32), twin(results, F32)
    return {
        "last_filled": float(filled.nonzero().max()),
        "reduce": largest_difference(mine, theirs),
    }


def largest_difference(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """NaN if there is one anywhere."""
    return float((mine.float() - theirs.float()).abs().max())


def main() -> None:
    from support.layer_op_cases import run_decoder, run_layer_ops
    from support.wide_segment import run_wide_segment

    measured = {case.name: run_case(case) for case in CASES}
    measured |= {case.name: run_write(case) for case in WRITE_CASES}
    measured["splits"] = run_splits()
    measured["nobody"] = run_nobody()
    measured["wide-segment"] = run_wide_segment()
    measured["layer-ops"] = run_layer_ops()
    measured["decoder"] = run_decoder()
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
