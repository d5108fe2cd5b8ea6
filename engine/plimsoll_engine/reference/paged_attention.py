"""Attention over paged keys and values in plain torch: the kernel's twin, and what the CPU runs.

In and out as ``ops.paged_attention``. Keys and values are gathered through the block tables.
Sequences with a single query (decode) are grouped by similar numbers of blocks and padded to the
longest of their group; the query heads of one KV head become the rows of one matrix product. The
others (prefill chunks) are taken one by one, in tiles of queries, and each tile reads only the keys
up to its last position. With a sliding window, blocks before it are not gathered. Both the gathered
copies and the masks are bounded, so that the memory of a step does not grow with the pool. All
layers gather into the same memory: fresh pages cost several times what the copy does.
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
    # int64 [group * blocks]: the rows of the keys in layer 0, from each one's first visible block
    # on; short ones repeat their last block.
    key_rows: torch.Tensor
    # Additive float mask [group, 1, 1, blocks * block_size].
    mask: torch.Tensor


@dataclass(frozen=True)
class PrefillChunk:
    # Half-open range of query rows.
    start: int
    stop: int
    context_len: int
    # Where the gathered keys begin.
    first_key: int
    key_rows: torch.Tensor


@dataclass(frozen=True)
class GatherPlan:
    """What is the same for all layers of a step that see the same window."""

    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillChunk, ...]
    # Additive [QUERY_TILE, longest context + QUERY_TILE]: row r sees the columns up to
    # r + longest context, as many as the window has. Any tile's mask is a part of it. None without
    # prefill chunks.
    staircase: torch.Tensor | None
    sliding_window: int | None
    # [2, most blocks of a group or chunk, row_elements]: where keys and values are gathered.
    gathered: torch.Tensor


def paged_attention(
    query: torch.Tensor,
    cache: KVCache,
    layer: int,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """As ``ops.paged_attention``."""
    plan = plan_gather(batch, cache.layout, query.dtype, sliding_window)
    return attend(query, cache.rows, cache.layout, layer, plan, scale, soft_cap)


def plan_gather(
    batch: AttentionBatch,
    layout: KVLayout,
    dtype: torch.dtype,
    sliding_window: int | None = None,
) -> GatherPlan:
    rows = first_row(layout, batch.block_tables.long())
    starts = batch.query_starts.tolist()
    decodes, prefills = [], []
    for index, (query_len, context_len) in enumerate(
        zip(batch.query_lens, batch.context_lens, strict=True)
    ):
        if query_len == 1:
            decodes.append(index)
            continue
        start = starts[index]
        first_block, blocks = _visible_blocks(query_len, context_len, layout, sliding_window)
        key_rows = rows[index, first_block : first_block + blocks].contiguous()
        first_key = first_block * layout.block_size
        prefills.append(PrefillChunk(start, start + query_len, context_len, first_key, key_rows))
    staircase = None
    if prefills:
        longest = max(chunk.context_len for chunk in prefills)
        mask = torch.full((QUERY_TILE, longest + QUERY_TILE), -math.inf, dtype=dtype)
        before_window = 0 if sliding_window is None else mask.tril(longest - sliding_window)
        staircase = mask.triu_(longest + 1).add_(before_window)
    groups = tuple(
        _decode_group(group, starts, batch, rows, layout, dtype, sliding_window)
        for group in _group_by_length(decodes, batch.context_lens, layout, sliding_window)
    )
    read = (*(group.key_rows for group in groups), *(chunk.key_rows for chunk in prefills))
    most = max(map(len, read))
    gathered = torch.empty((2, most, layout.row_elements), dtype=layout.dtype)
    return GatherPlan(groups, tuple(prefills), staircase, sliding_window, gathered)


def _visible_blocks(
    query_len: int, context_len: int, layout: KVLayout, sliding_window: int | None
) -> tuple[int, int]:
    """The first block that any of the last ``query_len`` tokens sees, and how many from there on."""
    first_key = 0
    if sliding_window is not None:
        first_key = max(0, context_len - query_len - sliding_window + 1)
    first_block = first_key // layout.block_size
    return first_block, math.ceil(context_len / layout.block_size) - first_block


def _group_by_length(
    decodes: list[int],
    context_lens: tuple[int, ...],
    layout: KVLayout,
    sliding_window: int | None,
) -> Iterator[list[int]]:
    """Groups whose shortest has at least half the blocks of its longest, bounded in bytes."""
    row_bytes = layout.row_elements * layout.dtype.itemsize
    lengths = {
        index: _visible_blocks(1, context_lens[index], layout, sliding_window)[1]
        for index in decodes
    }
    group: list[int] = []
    longest = 0
    for index in sorted(decodes, key=lambda index: -lengths[index]):
        blocks = lengths[index]
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
    sliding_window: int | None,
) -> DecodeGroup:
    lengths = [batch.context_lens[index] for index in group]
    visible = [_visible_blocks(1, length, layout, sliding_window) for length in lengths]
    first_block = torch.tensor([first for first, _ in visible])[:, None]
    own_blocks = torch.tensor([blocks for _, blocks in visible])[:, None]
    blocks = max(blocks for _, blocks in visible)
    # Padding reads a block of the sequence's own: what it holds is masked, but it must be finite.
    columns = first_block + torch.minimum(torch.arange(blocks), own_blocks - 1)
    key_rows = rows[torch.tensor(group)].gather(1, columns)
    keys_at = first_block * layout.block_size + torch.arange(blocks * layout.block_size)
    ends = torch.tensor(lengths)[:, None]
    hidden = keys_at >= ends
    if sliding_window is not None:
        hidden |= keys_at < ends - sliding_window
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
    soft_cap: float | None = None,
) -> torch.Tensor:
    """One layer of a step; ``rows`` are the cache's."""
    out = torch.empty(query.shape, dtype=query.dtype)
    for group in plan.decodes:
        _attend_decode(out, query, rows, layout, layer, group, plan, scale, soft_cap)
    for chunk in plan.prefills:
        _attend_prefill(out, query, rows, layout, layer, chunk, plan, scale, soft_cap)
    return out


def _gather(
    rows: torch.Tensor,
    layout: KVLayout,
    layer: int,
    key_rows: torch.Tensor,
    sequences: int,
    into: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, each [sequences, kv_heads, positions, head_size], until the next call."""
    first = key_rows + 2 * layer * layout.blocks_per_segment
    shape = (sequences, -1, layout.num_kv_heads, layout.head_size)
    keys, values = into[:, : len(key_rows)]
    torch.index_select(rows, 0, first, out=keys)
    torch.index_select(rows, 0, first + layout.blocks_per_segment, out=values)
    return keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)


def _attend_decode(
    out: torch.Tensor,
    query: torch.Tensor,
    rows: torch.Tensor,
    layout: KVLayout,
    layer: int,
    group: DecodeGroup,
    plan: GatherPlan,
    scale: float,
    soft_cap: float | None,
) -> None:
    sequences = len(group.queries)
    keys, values = _gather(rows, layout, layer, group.key_rows, sequences, plan.gathered)
    packed = query[group.queries].view(sequences, layout.num_kv_heads, -1, layout.head_size)
    result = _weigh(packed, keys, values, group.mask, scale, soft_cap)
    out[group.queries] = result.reshape(sequences, -1, layout.head_size)


def _attend_prefill(
    out: torch.Tensor,
    query: torch.Tensor,
    rows: torch.Tensor,
    layout: KVLayout,
    layer: int,
    chunk: PrefillChunk,
    plan: GatherPlan,
    scale: float,
    soft_cap: float | None,
) -> None:
    keys, values = _gather(rows, layout, layer, chunk.key_rows, 1, plan.gathered)
    staircase, window = plan.staircase, plan.sliding_window
    assert staircase is not None
    longest = staircase.shape[1] - QUERY_TILE
    before = chunk.context_len - (chunk.stop - chunk.start)
    for start in range(chunk.start, chunk.stop, QUERY_TILE):
        stop = min(start + QUERY_TILE, chunk.stop)
        # The tile's first query stands at this position; the tile sees [first_key, end).
        first = before + start - chunk.start
        end = first + stop - start
        first_key = chunk.first_key if window is None else max(chunk.first_key, first - window + 1)
        result = _weigh(
            query[start:stop].transpose(0, 1)[None],
            keys[:, :, first_key - chunk.first_key : end - chunk.first_key],
            values[:, :, first_key - chunk.first_key : end - chunk.first_key],
            staircase[: stop - start, longest - first + first_key : longest - first + end],
            scale,
            soft_cap,
        )
        out[start:stop] = result[0].transpose(0, 1)


def _weigh(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    """query [sequences, heads, rows, head_size], keys and values with as many heads or fewer."""
    if soft_cap is None:
        return F.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=mask,
            scale=scale,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
    # torch's own attention has no place for a cap.
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = (query @ keys.mT).float() * scale
    weights = (soft_cap * torch.tanh(scores / soft_cap) + mask).softmax(-1)
    return weights.to(values.dtype) @ values
