"""Attention over paged keys and values in plain torch: the kernel's twin, and what the CPU runs.

In and out as ``ops.paged_attention``. Keys and values are gathered through the block tables.
Sequences with a single query (decode) are grouped by similar context length and padded to the
longest of their group; the query heads of one KV head become the rows of one matrix product. The
others (prefill chunks) are taken one by one, in tiles of queries, and each tile sees only the keys
up to its last position. Both the gathered copies and the masks are bounded, so that the memory of a
step does not grow with the pool.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from plimsoll_engine.attention_batch import AttentionBatch
from plimsoll_engine.kv_cache import KVCache, KVLayout, first_row

# A prefill tile's mask is QUERY_TILE x context floats.
QUERY_TILE = 256
# Keys (or values) gathered at once for a decode group; one sequence may take more by itself.
GATHER_BYTES = 8 << 20


@dataclass(frozen=True)
class DecodeGroup:
    # int64 [group]: which rows of the query.
    queries: torch.Tensor
    # int64 [group * blocks]: the rows of the keys in layer 0; short tables repeat their last block.
    key_rows: torch.Tensor
    # Additive float mask [group, 1, 1, blocks * block_size].
    mask: torch.Tensor


@dataclass(frozen=True)
class PrefillChunk:
    # Half-open range of query rows.
    start: int
    stop: int
    context_len: int
    key_rows: torch.Tensor


@dataclass(frozen=True)
class GatherPlan:
    """What is the same for all layers of a step."""

    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillChunk, ...]
    # Additive [QUERY_TILE, longest context + QUERY_TILE]: row r sees the columns up to
    # r + longest context. Any tile's mask is a window of it. None without prefill chunks.
    staircase: torch.Tensor | None


def paged_attention(
    query: torch.Tensor, cache: KVCache, layer: int, batch: AttentionBatch, scale: float
) -> torch.Tensor:
    """As ``ops.paged_attention``."""
    plan = plan_gather(batch, cache.layout, query.dtype)
    return attend(query, cache.rows, cache.layout, layer, plan, scale)


def plan_gather(batch: AttentionBatch, layout: KVLayout, dtype: torch.dtype) -> GatherPlan:
    rows = first_row(layout, batch.block_tables.long())
    starts = batch.query_starts.tolist()
    decodes, prefills = [], []
    for index, (query_len, context_len) in enumerate(
        zip(batch.query_lens, batch.context_lens, strict=True)
    ):
        if query_len == 1:
            decodes.append(index)
            continue
        blocks = math.ceil(context_len / layout.block_size)
        start = starts[index]
        prefills.append(
            PrefillChunk(start, start + query_len, context_len, rows[index, :blocks].contiguous())
        )
    staircase = None
    if prefills:
        longest = max(chunk.context_len for chunk in prefills)
        mask = torch.full((QUERY_TILE, longest + QUERY_TILE), -math.inf, dtype=dtype)
        staircase = mask.triu_(longest + 1)
    return GatherPlan(
        tuple(
            _decode_group(group, starts, batch, rows, layout, dtype)
            for group in _group_by_length(decodes, batch.context_lens, layout)
        ),
        tuple(prefills),
        staircase,
    )


def _group_by_length(
    decodes: list[int], context_lens: tuple[int, ...], layout: KVLayout
) -> Iterator[list[int]]:
    """Groups whose shortest has at least half the blocks of its longest, bounded in bytes."""
    row_bytes = layout.row_elements * layout.dtype.itemsize
    group: list[int] = []
    longest = 0
    for index in sorted(decodes, key=lambda index: -context_lens[index]):
        blocks = math.ceil(context_lens[index] / layout.block_size)
        full = (len(group) + 1) * longest * row_bytes > GATHER_BYTES
        if group and (2 * blocks < longest or full):
            yield group
            group = []
        if not group:
            longest = blocks
        group.append(index)
    if group:
        yield group


def _decode_group(
    group: list[int],
    starts: list[int],
    batch: AttentionBatch,
    rows: torch.Tensor,
    layout: KVLayout,
    dtype: torch.dtype,
) -> DecodeGroup:
    indices = torch.tensor(group)
    lengths = torch.tensor([batch.context_lens[index] for index in group])
    blocks = math.ceil(int(lengths.max()) / layout.block_size)
    own_blocks = (lengths + layout.block_size - 1) // layout.block_size
    # Padding reads a block of the sequence's own: what it holds is masked, but it must be finite.
    columns = torch.minimum(torch.arange(blocks), own_blocks[:, None] - 1)
    key_rows = rows[indices].gather(1, columns)
    hidden = torch.arange(blocks * layout.block_size) >= lengths[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf)
    return DecodeGroup(
        torch.tensor([starts[index] for index in group]),
        key_rows.flatten(),
        mask[:, None, None, :],
    )


def attend(
    query: torch.Tensor,
    rows: torch.Tensor,
    layout: KVLayout,
    layer: int,
    plan: GatherPlan,
    scale: float,
) -> torch.Tensor:
    """One layer of a step; ``rows`` are the cache's."""
    out = torch.empty(query.shape, dtype=query.dtype)
    for group in plan.decodes:
        _attend_decode(out, query, rows, layout, layer, group, scale)
    for chunk in plan.prefills:
        assert plan.staircase is not None
        _attend_prefill(out, query, rows, layout, layer, chunk, plan.staircase, scale)
    return out


def _gather(
    rows: torch.Tensor, layout: KVLayout, layer: int, key_rows: torch.Tensor, sequences: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, each [sequences, kv_heads, positions, head_size]."""
    first = key_rows + 2 * layer * layout.blocks_per_segment
    shape = (sequences, -1, layout.num_kv_heads, layout.head_size)
    keys = rows.index_select(0, first).view(shape).transpose(1, 2)
    values = rows.index_select(0, first + layout.blocks_per_segment).view(shape).transpose(1, 2)
    return keys, values


def _attend_decode(
    out: torch.Tensor,
    query: torch.Tensor,
    rows: torch.Tensor,
    layout: KVLayout,
    layer: int,
    group: DecodeGroup,
    scale: float,
) -> None:
    sequences = len(group.queries)
    keys, values = _gather(rows, layout, layer, group.key_rows, sequences)
    packed = query[group.queries].view(sequences, layout.num_kv_heads, -1, layout.head_size)
    result = F.scaled_dot_product_attention(packed, keys, values, attn_mask=group.mask, scale=scale)
    out[group.queries] = result.reshape(sequences, -1, layout.head_size)


def _attend_prefill(
    out: torch.Tensor,
    query: torch.Tensor,
    rows: torch.Tensor,
    layout: KVLayout,
    layer: int,
    chunk: PrefillChunk,
    staircase: torch.Tensor,
    scale: float,
) -> None:
    keys, values = _gather(rows, layout, layer, chunk.key_rows, 1)
    longest = staircase.shape[1] - QUERY_TILE
    before = chunk.context_len - (chunk.stop - chunk.start)
    for start in range(chunk.start, chunk.stop, QUERY_TILE):
        stop = min(start + QUERY_TILE, chunk.stop)
        # The tile's first query stands at this position.
        first = before + start - chunk.start
        visible = first + stop - start
        mask = staircase[: stop - start, longest - first : longest - first + visible]
        result = F.scaled_dot_product_attention(
            query[start:stop].transpose(0, 1)[None],
            keys[:, :, :visible],
            values[:, :, :visible],
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )
        out[start:stop] = result[0].transpose(0, 1)
