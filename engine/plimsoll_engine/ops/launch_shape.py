"""How attention programs are cut: rows, query tokens and key positions, chosen without a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]

# tl.dot takes at least 16 rows and columns.
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


def padded_head_size(head_size: int) -> int:
    size: int = max(_MIN_BLOCK_M, triton.next_power_of_2(head_size))
    return size
