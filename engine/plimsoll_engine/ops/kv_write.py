"""Launches the kernel that stores keys and values; see ``kernels.kv_write``."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]

from plimsoll_engine.kernels.kv_write import kv_write_kernel
from plimsoll_engine.kv_cache import KVCache
from plimsoll_engine.ops.compile_options import COMPILE_OPTIONS


def kv_write(
    key: torch.Tensor, value: torch.Tensor, cache: KVCache, layer: int, slots: torch.Tensor
) -> None:
    """key, value [tokens, kv_heads, head_size] of the cache's dtype go to ``slots`` (int64
    [tokens], block id x block size + place in the block) of ``layer``; those with a slot below 0
    nowhere."""
    layout = cache.layout
    tokens, kv_heads, head_size = key.shape
    if value.shape != key.shape or (kv_heads, head_size) != (layout.num_kv_heads, layout.head_size):
        raise ValueError(f"key {tuple(key.shape)}, value {tuple(value.shape)} do not fit {layout}")
    if key.dtype != layout.dtype or value.dtype != layout.dtype:
        raise ValueError(f"key {key.dtype}, value {value.dtype}; the cache holds {layout.dtype}")
    if key.stride(-1) != 1 or value.stride(-1) != 1:
        raise ValueError("head_size must be the contiguous dimension of key and value")
    if slots.shape != (tokens,) or slots.dtype != torch.int64:
        raise ValueError(f"slots must be int64 [{tokens}], not {slots.dtype} {tuple(slots.shape)}")
    if not 0 <= layer < layout.num_layers:
        raise ValueError(f"layer {layer} is not one of {layout.num_layers}")
    if tokens == 0:
        return
    kv_write_kernel[(tokens, kv_heads)](
        key,
        value,
        slots,
        cache.segment_table,
        layer,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        BLOCKS_PER_SEGMENT=layout.blocks_per_segment,
        BLOCK_SIZE=layout.block_size,
        KV_HEADS=kv_heads,
        HEAD_SIZE=head_size,
        PADDED_HEAD_SIZE=triton.next_power_of_2(head_size),
        num_warps=1,
        **COMPILE_OPTIONS,
    )
