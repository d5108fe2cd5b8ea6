"""Decode over long contexts by many programs per sequence, and the pass that joins what they found.

What ``kernels.paged_attention`` computes, for batches where every sequence has one query token and
there are too few of them to fill the device. The tiles that a query may see are divided evenly into
NUM_SPLITS runs. The first kernel attends over one run and keeps, in float32,

    partials [sequences, heads, NUM_SPLITS, head_size]    sum of weights x values
    maxima, sums [sequences, heads, NUM_SPLITS]           of the scores, and of the weights

where a run without tiles has the maximum -inf, the sum 0 and an unset partial. The second kernel
brings the runs to one maximum and divides. The number of splits is fixed, so that neither grid
depends on context lengths, and the order of additions depends on nothing but the context.
"""

# A kernel's arguments have no Python types, and triton ships none.
# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from plimsoll_engine.kernels.paged_attention import attend_tiles


@triton.jit(do_not_specialize=["layer"])
def attend_splits_kernel(
    partials_ptr,
    maxima_ptr,
    sums_ptr,
    query_ptr,
    segment_table_ptr,
    block_tables_ptr,
    context_lens_ptr,
    # scale * log2(e): the softmax is computed in base 2.
    scale_log2,
    layer,
    stride_query_token,
    stride_query_head,
    stride_table,
    BLOCKS_PER_SEGMENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context_len = tl.load(context_lens_ptr + sequence)
    first = 0
    if WINDOW is not None:
        first = tl.maximum(0, context_len - WINDOW) // TILE * TILE
    # Rounded up to whole tiles.
    run: tl.constexpr = NUM_SPLITS * TILE
    run_len = (context_len - first + run - 1) // run * TILE
    start = first + split * run_len
    stop = tl.minimum(context_len, start + run_len)

    rows = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + rows
    row_valid = rows < GROUP
    cells = (sequence * (KV_HEADS * GROUP) + heads) * NUM_SPLITS + split
    if start >= stop:
        tl.store(maxima_ptr + cells, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=row_valid)
        tl.store(sums_ptr + cells, tl.zeros([BLOCK_M], tl.float32), mask=row_valid)
        return

    dims = tl.arange(0, PADDED_HEAD_SIZE)
    valid = row_valid[:, None] & (dims < HEAD_SIZE)[None, :]
    query = tl.load(
        query_ptr
        + sequence * stride_query_token
        + heads[:, None] * stride_query_head
        + dims[None, :],
        mask=valid,
        other=0.0,
    )
    accumulated, row_max, row_sum = attend_tiles(
        query,
        tl.zeros([BLOCK_M], tl.int32) + (context_len - 1),
        segment_table_ptr,
        block_tables_ptr + sequence * stride_table,
        layer,
        kv_head,
        start,
        stop,
        scale_log2,
        BLOCKS_PER_SEGMENT,
        BLOCK_SIZE,
        KV_HEADS,
        HEAD_SIZE,
        PADDED_HEAD_SIZE,
        BLOCK_M,
        TILE,
        WINDOW,
        SOFT_CAP,
    )
    tl.store(maxima_ptr + cells, row_max, mask=row_valid)
    tl.store(sums_ptr + cells, row_sum, mask=row_valid)
    tl.store(partials_ptr + cells[:, None] * HEAD_SIZE + dims[None, :], accumulated, mask=valid)


@triton.jit
def reduce_splits_kernel(
    out_ptr,
    partials_ptr,
    maxima_ptr,
    sums_ptr,
    stride_out_token,
    stride_out_head,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cells = (sequence * HEADS + head) * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    maxima = tl.load(maxima_ptr + cells)
    filled = maxima > float("-inf")
    highest = tl.max(maxima, axis=0)
    # Without it a sequence that sees nothing at all would be -inf - -inf.
    highest = tl.where(highest > float("-inf"), highest, 0.0)
    factors = tl.exp2(maxima - highest)
    total = tl.sum(tl.load(sums_ptr + cells) * factors, axis=0)

    dims = tl.arange(0, PADDED_HEAD_SIZE)
    dim_valid = dims < HEAD_SIZE
    # An empty run's partial was never written: it may hold anything, so it is not read.
    partials = tl.load(
        partials_ptr + cells[:, None] * HEAD_SIZE + dims[None, :],
        mask=filled[:, None] & dim_valid[None, :],
        other=0.0,
    )
    out = tl.sum(partials * factors[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    tl.store(
        out_ptr + sequence * stride_out_token + head * stride_out_head + dims,
        out.to(out_ptr.dtype.element_ty),
        mask=dim_valid,
    )
