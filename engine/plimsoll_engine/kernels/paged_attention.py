"""Attention over paged keys and values, for decode and chunked prefill in one batch.

    out[t, h] = softmax(scale * q[t, h] K^T) V       over positions <= the token's own

With WINDOW only the last WINDOW of those positions are seen, the token's own among them; with
SOFT_CAP a score s becomes SOFT_CAP * tanh(s / SOFT_CAP). Both are None when they are off.

query, out [tokens, heads, head_size], sequences one after the other; keys and values are read from
the segments (kv_cache.py) by block table. A program computes one block of queries for one KV head:
BLOCK_Q tokens x GROUP query heads of that KV head are the BLOCK_M rows of its matrix products, so
that decode with grouped heads fills them too. It walks the keys in tiles of TILE positions, which
is independent of the block size, from the first position that any of its queries may see to the
last: tiles outside are never read.

The grid does not depend on context lengths: (tokens // BLOCK_Q + sequences, kv_heads). Sequence s
owns the query blocks from query_starts[s] // BLOCK_Q + s on; the surplus ones return at once.
"""

# A kernel's arguments have no Python types, and triton ships none.
# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_sequence(query_starts_ptr, query_block, num_sequences, BLOCK_Q: tl.constexpr):
    """The last sequence whose first query block is at or before ``query_block``."""
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        first_block = tl.load(query_starts_ptr + middle) // BLOCK_Q + middle
        if first_block <= query_block:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def update_softmax(scores, row_max, row_sum):
    """Online softmax in base 2: (weights, factor for what was summed before, new max, new sum).

    A row without any visible position so far keeps the maximum -inf; its weights and its factor are
    0 then, not NaN.
    """
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - safe_max[:, None])
    factor = tl.exp2(row_max - safe_max)
    return weights, factor, new_max, row_sum * factor + tl.sum(weights, axis=1)


@triton.jit
def soften(scores, SOFT_CAP: tl.constexpr):
    """SOFT_CAP * tanh(scores / SOFT_CAP): there is no tanh that the interpreter knows as well."""
    # exp(2x) in base 2; where it overflows the result is 1, as it must be.
    grown = tl.exp2(scores * (2.0 * 1.4426950408889634 / SOFT_CAP))
    return SOFT_CAP * (1.0 - 2.0 / (1.0 + grown))


@triton.jit
def attend_tiles(
    query,
    positions,
    segment_table_ptr,
    table_ptr,
    layer,
    kv_head,
    start,
    stop,
    scale_log2,
    BLOCKS_PER_SEGMENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Of the keys at [start, stop): (sum of weighted values, maxima, sums of weights), per row.

    query [BLOCK_M, PADDED_HEAD_SIZE]; positions [BLOCK_M]: where the rows' tokens stand. Scores and
    SOFT_CAP are in base 2, as ``scale_log2`` says.
    """
    element = query.dtype
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulated = tl.zeros([BLOCK_M, PADDED_HEAD_SIZE], tl.float32)
    dims = tl.arange(0, PADDED_HEAD_SIZE)
    dim_valid = dims < HEAD_SIZE
    row_size: tl.constexpr = KV_HEADS * HEAD_SIZE
    # 64 bits from here on: a segment may hold more than 2^31 elements.
    layer_row = layer.to(tl.int64) * (2 * BLOCKS_PER_SEGMENT)
    for tile in range(start, stop, TILE):
        keys_at = tile + tl.arange(0, TILE)
        key_valid = keys_at < stop
        block = tl.load(table_ptr + keys_at // BLOCK_SIZE, mask=key_valid, other=0)
        base = tl.load(segment_table_ptr + block // BLOCKS_PER_SEGMENT, mask=key_valid, other=0)
        place = (layer_row + block % BLOCKS_PER_SEGMENT) * BLOCK_SIZE + keys_at % BLOCK_SIZE
        key_ptr = base.to(tl.pointer_type(element)) + place * row_size + kv_head * HEAD_SIZE
        value_ptr = key_ptr + BLOCKS_PER_SEGMENT * BLOCK_SIZE * row_size

        # [PADDED_HEAD_SIZE, TILE]
        key = tl.load(
            key_ptr[None, :] + dims[:, None],
            mask=dim_valid[:, None] & key_valid[None, :],
            other=0.0,
        )
        scores = tl.dot(query, key, input_precision="ieee") * scale_log2
        if SOFT_CAP is not None:
            scores = soften(scores, SOFT_CAP)
        visible = key_valid[None, :] & (keys_at[None, :] <= positions[:, None])
        if WINDOW is not None:
            visible = visible & (keys_at[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        weights, factor, row_max, row_sum = update_softmax(scores, row_max, row_sum)

        # [TILE, PADDED_HEAD_SIZE]
        value = tl.load(
            value_ptr[:, None] + dims[None, :],
            mask=key_valid[:, None] & dim_valid[None, :],
            other=0.0,
        )
        accumulated = accumulated * factor[:, None]
        accumulated += tl.dot(weights.to(element), value, input_precision="ieee")
    return accumulated, row_max, row_sum


@triton.jit(do_not_specialize=["layer", "num_sequences"])
def paged_attention_kernel(
    out_ptr,
    query_ptr,
    segment_table_ptr,
    block_tables_ptr,
    query_starts_ptr,
    context_lens_ptr,
    # scale * log2(e): the softmax is computed in base 2.
    scale_log2,
    layer,
    num_sequences,
    stride_out_token,
    stride_out_head,
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
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    query_block = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = find_sequence(query_starts_ptr, query_block, num_sequences, BLOCK_Q)
    query_start = tl.load(query_starts_ptr + sequence)
    query_len = tl.load(query_starts_ptr + sequence + 1) - query_start
    first_query = (query_block - query_start // BLOCK_Q - sequence) * BLOCK_Q
    if first_query >= query_len:
        return
    context_len = tl.load(context_lens_ptr + sequence)

    # Row m is query token first_query + m // GROUP, head kv_head * GROUP + m % GROUP.
    rows = tl.arange(0, BLOCK_M)
    tokens = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    row_valid = (rows < BLOCK_Q * GROUP) & (tokens < query_len)
    positions = context_len - query_len + tokens
    dims = tl.arange(0, PADDED_HEAD_SIZE)
    dim_valid = dims < HEAD_SIZE

    token_index = (query_start + tokens).to(tl.int64)
    query = tl.load(
        query_ptr
        + token_index[:, None] * stride_query_token
        + heads[:, None] * stride_query_head
        + dims[None, :],
        mask=row_valid[:, None] & dim_valid[None, :],
        other=0.0,
    )

    # The first position that the block's first query sees, and the one after its last query's.
    first_position = context_len - query_len + first_query
    start = 0
    if WINDOW is not None:
        start = tl.maximum(0, first_position - WINDOW + 1) // TILE * TILE
    accumulated, _, row_sum = attend_tiles(
        query,
        positions,
        segment_table_ptr,
        block_tables_ptr + sequence.to(tl.int64) * stride_table,
        layer,
        kv_head,
        start,
        tl.minimum(context_len, first_position + BLOCK_Q),
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
    # Rows that only fill up the block may have seen nothing.
    out = accumulated / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
    tl.store(
        out_ptr
        + token_index[:, None] * stride_out_token
        + heads[:, None] * stride_out_head
        + dims[None, :],
        out.to(query.dtype),
        mask=row_valid[:, None] & dim_valid[None, :],
    )
