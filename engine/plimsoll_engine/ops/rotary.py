"""Launches the rotary embedding; see ``kernels.rotary``."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]

from plimsoll_engine.kernels.rotary import rotary_kernel
from plimsoll_engine.ops.compile_options import COMPILE_OPTIONS

# Elements of half heads that a program of four warps turns at once.
_ELEMENTS_AT_ONCE = 1024


def heads_at_once(half: int) -> int:
    return max(1, _ELEMENTS_AT_ONCE // int(triton.next_power_of_2(half)))


def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [tokens, heads, head_size] and key [tokens, kv_heads, head_size] by cos and sin
    [tokens, 1, head_size / 2], all of one dtype -> both, turned."""
    tokens, heads, head_size = query.shape
    half = head_size // 2
    if head_size % 2 or key.shape[0] != tokens or key.shape[2] != head_size:
        raise ValueError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} must have the same tokens and "
            "an even head size"
        )
    for name, angle in (("cos", cos), ("sin", sin)):
        if angle.shape != (tokens, 1, half):
            raise ValueError(f"{name} {tuple(angle.shape)} must be {(tokens, 1, half)}")
    if any(tensor.dtype != query.dtype for tensor in (key, cos, sin)):
        raise ValueError(f"key, cos and sin must be {query.dtype} as the query is")
    if any(tensor.stride(-1) != 1 for tensor in (query, key, cos, sin)):
        raise ValueError("the last dimension must be the contiguous one")
    turned_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    turned_key = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    if tokens == 0:
        return turned_query, turned_key
    rotary_kernel[(tokens,)](
        turned_query,
        turned_key,
        query,
        key,
        cos,
        sin,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        cos.stride(0),
        sin.stride(0),
        QUERY_HEADS=heads,
        KEY_HEADS=key.shape[1],
        HALF=half,
        PADDED_HALF=triton.next_power_of_2(half),
        HEADS_AT_ONCE=heads_at_once(half),
        num_warps=4,
        **COMPILE_OPTIONS,
    )
    return turned_query, turned_key
