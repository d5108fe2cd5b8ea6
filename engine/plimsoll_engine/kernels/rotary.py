"""Rotary position embedding of queries and keys.

    out[:half] = x[:half] * cos - x[half:] * sin
    out[half:] = x[half:] * cos + x[:half] * sin           half = head_size / 2

query and key [tokens, heads, head_size], each with its own number of heads; cos and sin
[tokens, head_size / 2] of the same type. One program turns one token's heads, HEADS_AT_ONCE at a
time: the queries' first, then the keys'. Products are rounded to the element type before they are
added, as in plain torch.
"""

# A kernel's arguments have no Python types, and triton ships none.
# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turn_heads(
    out_ptr,
    x_ptr,
    token,
    stride_token,
    stride_head,
    cos,
    sin,
    dims,
    inside,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
):
    """x is at ``x_ptr`` with its strides; out is contiguous."""
    element = x_ptr.dtype.element_ty
    for start in range(0, HEADS, HEADS_AT_ONCE):
        heads = start + tl.arange(0, HEADS_AT_ONCE)
        valid = (heads < HEADS)[:, None] & inside[None, :]
        x = x_ptr + token * stride_token + heads[:, None] * stride_head + dims[None, :]
        first = tl.load(x, mask=valid, other=0.0).to(tl.float32)
        second = tl.load(x + HALF, mask=valid, other=0.0).to(tl.float32)
        out = out_ptr + (token * HEADS + heads[:, None]) * (2 * HALF) + dims[None, :]
        turned = (first * cos).to(element) - (second * sin).to(element)
        tl.store(out, turned.to(element), mask=valid)
        turned = (second * cos).to(element) + (first * sin).to(element)
        tl.store(out + HALF, turned.to(element), mask=valid)


@triton.jit
def rotary_kernel(
    query_out_ptr,
    key_out_ptr,
    query_ptr,
    key_ptr,
    cos_ptr,
    sin_ptr,
    stride_query_token,
    stride_query_head,
    stride_key_token,
    stride_key_head,
    stride_cos_token,
    stride_sin_token,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED_HALF)
    inside = dims < HALF
    cos = tl.load(cos_ptr + token * stride_cos_token + dims, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + token * stride_sin_token + dims, mask=inside, other=0.0)
    cos = cos.to(tl.float32)[None, :]
    sin = sin.to(tl.float32)[None, :]
    turn_heads(
        query_out_ptr,
        query_ptr,
        token,
        stride_query_token,
        stride_query_head,
        cos,
        sin,
        dims,
        inside,
        QUERY_HEADS,
        HALF,
        HEADS_AT_ONCE,
    )
    turn_heads(
        key_out_ptr,
        key_ptr,
        token,
        stride_key_token,
        stride_key_head,
        cos,
        sin,
        dims,
        inside,
        KEY_HEADS,
        HALF,
        HEADS_AT_ONCE,
    )
