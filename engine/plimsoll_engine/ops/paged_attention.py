"""Launches paged attention; see ``kernels.paged_attention`` for what a program does."""

from __future__ import annotations

import math

import torch

from plimsoll_engine.attention_batch import AttentionBatch
from plimsoll_engine.kernels.paged_attention import paged_attention_kernel
from plimsoll_engine.kv_cache import KVCache
from plimsoll_engine.ops.compile_options import COMPILE_OPTIONS
from plimsoll_engine.ops.launch_shape import launch_shape, padded_head_size
from plimsoll_engine.ops.split_attention import is_split, split_attention

HEAD_SIZES = range(16, 257)


def paged_attention(
    query: torch.Tensor,
    cache: KVCache,
    layer: int,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """query [tokens, heads, head_size] of the cache's dtype -> the same shape.

    The keys and values of this step's own tokens are in the cache already. With ``sliding_window``
    a token sees that many positions, its own included; ``soft_cap`` bounds the scaled scores.
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
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}; allowed: 1 and more, or None")
    if soft_cap is not None and soft_cap <= 0.0:
        raise ValueError(f"soft_cap is {soft_cap}; allowed: above 0, or None")
    if is_split(batch, layout.num_kv_heads):
        return split_attention(query, cache, layer, batch, scale, sliding_window, soft_cap)
    return whole_attention(query, cache, layer, batch, scale, sliding_window, soft_cap)


def whole_attention(
    query: torch.Tensor,
    cache: KVCache,
    layer: int,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """As ``paged_attention``, each query block by one program for its whole context."""
    layout = cache.layout
    tokens, heads, head_size = query.shape
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
        PADDED_HEAD_SIZE=padded_head_size(head_size),
        BLOCK_M=shape.block_m,
        BLOCK_Q=shape.block_q,
        TILE=shape.tile,
        WINDOW=sliding_window,
        SOFT_CAP=None if soft_cap is None else soft_cap * math.log2(math.e),
        num_warps=shape.num_warps,
        **COMPILE_OPTIONS,
    )
    return out
