"""Launches decode attention in splits; see ``kernels.split_attention``.

``paged_attention`` decides when, and has checked the arguments.
"""

from __future__ import annotations

import math

import torch
import triton  # type: ignore[import-untyped]

from plimsoll_engine.attention_batch import AttentionBatch
from plimsoll_engine.kernels.split_attention import attend_splits_kernel, reduce_splits_kernel
from plimsoll_engine.kv_cache import KVCache
from plimsoll_engine.ops.compile_options import COMPILE_OPTIONS
from plimsoll_engine.ops.launch_shape import launch_shape, padded_head_size
from plimsoll_engine.reference.split_attention import SplitResults

# vLLM's figures (triton_attn.py): a multiprocessor count of programs is filled by 16 splits of 8
# sequences and KV heads, and from 128 sequences and KV heads on it is filled without.
NUM_SPLITS = 16
MAX_UNSPLIT_PROGRAMS = 128


def is_split(batch: AttentionBatch, num_kv_heads: int) -> bool:
    """Every sequence has one query, and there are few: context lengths must not decide, or a
    captured graph would keep the choice that was right when it was captured."""
    sequences = len(batch.query_lens)
    return batch.num_tokens == sequences and sequences * num_kv_heads <= MAX_UNSPLIT_PROGRAMS


def split_attention(
    query: torch.Tensor,
    cache: KVCache,
    layer: int,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """As ``ops.paged_attention``, for one query per sequence."""
    return reduce_splits(
        attend_splits(query, cache, layer, batch, scale, sliding_window, soft_cap), query.dtype
    )


def attend_splits(
    query: torch.Tensor,
    cache: KVCache,
    layer: int,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> SplitResults:
    layout = cache.layout
    sequences, heads, head_size = query.shape
    group = heads // layout.num_kv_heads
    shape = launch_shape(group, 1, head_size, query.dtype)
    cells = (sequences, heads, NUM_SPLITS)
    results = SplitResults(
        torch.empty((*cells, head_size), dtype=torch.float32, device=query.device),
        torch.empty(cells, dtype=torch.float32, device=query.device),
        torch.empty(cells, dtype=torch.float32, device=query.device),
    )
    attend_splits_kernel[(sequences, layout.num_kv_heads, NUM_SPLITS)](
        results.partials,
        results.maxima,
        results.sums,
        query,
        cache.segment_table,
        batch.block_tables,
        batch.context_lens_tensor,
        scale * math.log2(math.e),
        layer,
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
        TILE=shape.tile,
        NUM_SPLITS=NUM_SPLITS,
        WINDOW=sliding_window,
        SOFT_CAP=None if soft_cap is None else soft_cap * math.log2(math.e),
        num_warps=shape.num_warps,
        **COMPILE_OPTIONS,
    )
    return results


def reduce_splits(results: SplitResults, dtype: torch.dtype) -> torch.Tensor:
    """-> [sequences, heads, head_size]"""
    sequences, heads, num_splits, head_size = results.partials.shape
    out = torch.empty((sequences, heads, head_size), dtype=dtype, device=results.partials.device)
    reduce_splits_kernel[(sequences, heads)](
        out,
        results.partials,
        results.maxima,
        results.sums,
        out.stride(0),
        out.stride(1),
        HEADS=heads,
        HEAD_SIZE=head_size,
        PADDED_HEAD_SIZE=triton.next_power_of_2(head_size),
        NUM_SPLITS=num_splits,
        num_warps=1,
        **COMPILE_OPTIONS,
    )
    return out
