"""Launches paged attention; see ``kernels.paged_attention`` for what a program does."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]

from plimsoll_engine.attention_batch import AttentionBatch
from plimsoll_engine.kernels.paged_attention import paged_attention_kernel
from plimsoll_engine.kv_cache import KVCache
from plimsoll_engine.ops.compile_options import COMPILE_OPTIONS

HEAD_SIZES = range(16, 257)
# tl.dot takes at least 16 rows.
_MIN_BLOCK_M = 16
_NARROW_TILE = 16
_WIDE_TILE = 32


@dataclass(frozen=True)
class LaunchShape:
    # Rows of a program's matrix products, and how many query tokens they hold.
    block_m: int
    block_q: int
    # Key positions per step of a program.
    tile: int
    num_warps: int


def launch_shape(group: int, max_query_len: int, head_size: int, dtype: torch.dtype) -> LaunchShape:
    """``group`` is the number of query heads per KV head."""
    block_m = max(_MIN_BLOCK_M, triton.next_power_of_2(group))
    # A wide tile pays in prefill, unless its registers spill: as they do in float32, and with the
    # masks of a head size that is padded.
    padded = head_size != triton.next_power_of_2(head_size)
    narrow = max_query_len == 1 or dtype.itemsize > 2 or padded
    return LaunchShape(
        block_m, block_m // group, _NARROW_TILE if narrow else _WIDE_TILE, num_warps=4
    )


def paged_attention(
    query: torch.Tensor, cache: KVCache, layer: int, batch: AttentionBatch, scale: float
) -> torch.Tensor:
    """query [tokens, heads, head_size] of the cache's dtype -> the same shape.

    The keys and values of this step's own tokens are in the cache already.
    """
    layout = cache.layout
    tokens, heads, head_size = query.shape
    if head_size != layout.head_size or head_size not in HEAD_SIZES:
        raise ValueError(
            f"head size {head_size}: the cache has {layout.head_size}, the kernel takes "
            f"{HEAD_SIZES.start} to {HEAD_SIZES.stop - 1}"
        )
    if heads % layout.num_kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {layout.num_kv_heads} KV heads")
    if query.dtype != layout.dtype:
        raise ValueError(f"query {query.dtype}; the cache holds {layout.dtype}")
    if query.stride(-1) != 1:
        raise ValueError("head_size must be the contiguous dimension of the query")
    if tokens != batch.num_tokens:
        raise ValueError(f"{tokens} query rows for a batch of {batch.num_tokens} tokens")
    if not 0 <= layer < layout.num_layers:
        raise ValueError(f"layer {layer} is not one of {layout.num_layers}")
    group = heads // layout.num_kv_heads
    shape = launch_shape(group, max(batch.query_lens), head_size, query.dtype)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    sequences = len(batch.query_lens)
    grid = (tokens // shape.block_q + sequences, layout.num_kv_heads)
    paged_attention_kernel[grid](
        out,
        query,
        cache.segment_table,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens_tensor,
        scale * math.log2(math.e),
        layer,
        sequences,
        out.stride(0),
        out.stride(1),
        query.stride(0),
        query.stride(1),
        batch.block_tables.stride(0),
        BLOCKS_PER_SEGMENT=layout.blocks_per_segment,
        BLOCK_SIZE=layout.block_size,
        KV_HEADS=layout.num_kv_heads,
        GROUP=group,
        HEAD_SIZE=head_size,
        PADDED_HEAD_SIZE=max(16, triton.next_power_of_2(head_size)),
        BLOCK_M=shape.block_m,
        BLOCK_Q=shape.block_q,
        TILE=shape.tile,
        num_warps=shape.num_warps,
        **COMPILE_OPTIONS,
    )
    return out
