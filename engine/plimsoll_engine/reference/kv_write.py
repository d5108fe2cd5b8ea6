"""Stores the keys and values of a step's tokens into their blocks, in plain torch."""

from __future__ import annotations

import torch

from plimsoll_engine.kv_cache import KVCache, KVLayout, first_row


def kv_write(
    key: torch.Tensor, value: torch.Tensor, cache: KVCache, layer: int, slots: torch.Tensor
) -> None:
    """As ``ops.kv_write``."""
    store(key, value, cache.rows, cache.layout, layer, token_rows(cache.layout, slots))


def token_rows(layout: KVLayout, slots: torch.Tensor) -> torch.Tensor:
    """Row of each slot's key in layer 0, counted in tokens; the same for every layer of a step."""
    blocks = torch.div(slots, layout.block_size, rounding_mode="floor")
    return first_row(layout, blocks) * layout.block_size + slots % layout.block_size


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    rows: torch.Tensor,
    layout: KVLayout,
    layer: int,
    first: torch.Tensor,
) -> None:
    """``rows`` are the cache's, ``first`` what ``token_rows`` gave."""
    by_token = rows.view(-1, layout.num_kv_heads, layout.head_size)
    step = layout.blocks_per_segment * layout.block_size
    target = first + 2 * layer * step
    by_token[target] = key
    by_token[target + step] = value
