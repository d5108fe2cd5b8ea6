"""Attention over paged keys and values, for decode and chunked prefill in one batch.

    out[t, h] = softmax(scale * q[t, h] K^T) V       over positions <= the token's own

query, out [tokens, heads, head_size], sequences one after the other; keys and values are read from
the segments (kv_cache.py) by block table. A program computes one block of queries for one KV head:
BLOCK_Q tokens x GROUP query heads of that KV head are the BLOCK_M rows of its matrix products, so
that decode with grouped heads fills them too. It walks the keys in tiles of TILE positions, which
is independent of the block size, and stops at the last position that its queries may see.

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

    A row without any visible position so far keeps the maximum -inf; its factor must be 1, not NaN.
    """
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - safe_max[:, None])
    factor = tl.exp2(row_max - safe_max)
    return weights, factor, new_max, row_sum * factor + tl.sum(weights, axis=1)


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

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulated = tl.zeros([BLOCK_M, PADDED_HEAD_SIZE], tl.float32)

    element = query_ptr.dtype.element_ty
    row_size: tl.constexpr = KV_HEADS * HEAD_SIZE
    layer_row = layer.to(tl.int64) * (2 * BLOCKS_PER_SEGMENT)
    table_ptr = block_tables_ptr + sequence.to(tl.int64) * stride_table
    # Positions from here on are after the block's last query: skip their tiles.
    end = tl.minimum(context_len, context_len - query_len + first_query + BLOCK_Q)
    for start in range(0, end, TILE):
        keys_at = start + tl.arange(0, TILE)
        key_valid = keys_at < end
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
        visible = key_valid[None, :] & (keys_at[None, :] <= positions[:, None])
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

    out = accumulated / row_sum[:, None]
    tl.store(
        out_ptr
        + token_index[:, None] * stride_out_token
        + heads[:, None] * stride_out_head
        + dims[None, :],
        out.to(element),
        mask=row_valid[:, None] & dim_valid[None, :],
    )
