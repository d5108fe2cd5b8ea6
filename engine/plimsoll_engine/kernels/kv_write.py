"""Stores the keys and values of a step's tokens into their blocks.

    cache[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = key, value        per token and KV head

key, value [tokens, kv_heads, head_size]; slots int64 [tokens], slot = block id x BLOCK_SIZE + place.
A token with a slot below 0 is stored nowhere: it fills up a recorded batch (step_graphs.py).
A block's address is its segment's base out of the table plus a 64-bit offset (kv_cache.py).
"""

# A kernel's arguments have no Python types, and triton ships none.
# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


# One program for all layers, not one for each remainder of the layer's number.
@triton.jit(do_not_specialize=["layer"])
def kv_write_kernel(
    key_ptr,
    value_ptr,
    slots_ptr,
    segment_table_ptr,
    layer,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    BLOCKS_PER_SEGMENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    base = tl.load(segment_table_ptr + block // BLOCKS_PER_SEGMENT)
    segment = base.to(tl.pointer_type(key_ptr.dtype.element_ty))

    row = layer.to(tl.int64) * (2 * BLOCKS_PER_SEGMENT) + block % BLOCKS_PER_SEGMENT
    place = slot % BLOCK_SIZE
    key_offset = ((row * BLOCK_SIZE + place) * KV_HEADS + head) * HEAD_SIZE
    value_offset = key_offset + BLOCKS_PER_SEGMENT * BLOCK_SIZE * KV_HEADS * HEAD_SIZE

    dims = tl.arange(0, PADDED_HEAD_SIZE)
    inside = dims < HEAD_SIZE
    key = tl.load(key_ptr + token * stride_key_token + head * stride_key_head + dims, mask=inside)
    value = tl.load(
        value_ptr + token * stride_value_token + head * stride_value_head + dims, mask=inside
    )
    tl.store(segment + key_offset + dims, key, mask=inside)
    tl.store(segment + value_offset + dims, value, mask=inside)
