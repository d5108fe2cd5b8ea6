"""A KV segment of more than 2^32 elements, of which only a few pages ever exist.

An offset of 32 bits would wrap in it and reach another block, or no memory at all.
"""

from __future__ import annotations

import math

import torch

from plimsoll_engine.attention_batch import build_attention_batch
from plimsoll_engine.kv_cache import CpuKVCache, KVLayout

HEAD_SIZE, BLOCK_SIZE, LAYERS = 64, 16, 2
# One layer's keys alone have 2^31 elements; the mapping is 16 GiB of addresses.
BLOCKS = 2**31 // (BLOCK_SIZE * HEAD_SIZE)
# (query tokens, context); the blocks are the segment's last and others far apart.
SEQUENCES = ((1, 40), (1, 17))
TABLES = ((BLOCKS - 1, BLOCKS // 2 + 1, 0), (BLOCKS - 2, BLOCKS // 2))


def run_wide_segment() -> dict[str, float]:
    """Largest differences of what was written, and of both attention kernels from their twin."""
    from plimsoll_engine.ops.kv_write import kv_write
    from plimsoll_engine.ops.paged_attention import paged_attention, whole_attention
    from plimsoll_engine.reference.paged_attention import paged_attention as twin

    layout = KVLayout(LAYERS, 1, HEAD_SIZE, BLOCK_SIZE, torch.float16, BLOCKS)
    # Not resized: that would write all of it.
    cache = CpuKVCache(layout, layout.segment_bytes)
    slots = torch.tensor(
        [
            table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for table, (_, context) in zip(TABLES, SEQUENCES, strict=True)
            for position in range(context)
        ]
    )
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, HEAD_SIZE, generator=generator).half()

    key, value, query = random(len(slots), 1), random(len(slots), 1), random(len(SEQUENCES), 2)
    layer = LAYERS - 1
    kv_write(key, value, cache, layer, slots)
    by_token = cache.rows.view(LAYERS, 2, -1, HEAD_SIZE)[layer]
    batch = build_attention_batch(
        [queries for queries, _ in SEQUENCES],
        [context for _, context in SEQUENCES],
        TABLES,
        torch.device("cpu"),
    )
    scale = 1 / math.sqrt(HEAD_SIZE)
    expected = twin(query, cache, layer, batch, scale)
    if not expected.abs().amax((1, 2)).min() > 0.01:
        raise ValueError(f"nothing to compare: {expected}")

    def difference(mine: torch.Tensor, theirs: torch.Tensor) -> float:
        return float((mine.float() - theirs.float()).abs().max())

    return {
        "write": difference(by_token[:, slots], torch.stack([key[:, 0], value[:, 0]])),
        "attention": difference(paged_attention(query, cache, layer, batch, scale), expected),
        "whole": difference(whole_attention(query, cache, layer, batch, scale), expected),
    }
