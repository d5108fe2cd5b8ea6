"""The memory behind the KV blocks: a list of segments that grows and shrinks while serving.

In: a number of blocks to be committed. Out: where each block is. A segment holds the same number
of blocks of every layer, as [layers, 2 (key, value), blocks, block_size, kv_heads, head_size]; block
id b is block b % blocks_per_segment of segment b // blocks_per_segment. This module knows nothing
of requests: who owns a block is the core's business.

On the CPU the segments are consecutive pieces of one private mapping, reserved once for as much as
the device could ever hold: committing a segment writes it (so that the memory is really there and
counts), releasing it hands its pages back at once (MADV_DONTNEED), and all blocks stay addressable
as rows of one tensor. On CUDA a segment is a tensor of its own, and kernels find it through a table
of base addresses which is updated in place.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import Protocol

import torch

_PAGE = mmap.PAGESIZE
# Not in the mmap module before Python 3.13.
_MAP_NORESERVE = 0x4000
# A segment is the step by which the pool moves: small beside the device, large beside a page (CPU)
# or beside the 2 MiB granularity of CUDA allocations.
_CPU_SEGMENTS_PER_DEVICE = 512
_CPU_SEGMENT_BYTES = (1 << 18, 1 << 24)
_CUDA_SEGMENT_BYTES = 1 << 26


@dataclass(frozen=True)
class KVLayout:
    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int
    # Of what is stored; what the model computes in may be another.
    dtype: torch.dtype
    blocks_per_segment: int

    @property
    def row_elements(self) -> int:
        """Elements of one block in one layer, of keys or of values."""
        return self.block_size * self.num_kv_heads * self.head_size

    @property
    def bytes_per_block(self) -> int:
        return self.num_layers * 2 * self.row_elements * self.dtype.itemsize

    @property
    def segment_bytes(self) -> int:
        return self.bytes_per_block * self.blocks_per_segment

    @property
    def segment_shape(self) -> tuple[int, ...]:
        return (
            self.num_layers,
            2,
            self.blocks_per_segment,
            self.block_size,
            self.num_kv_heads,
            self.head_size,
        )


class KVCache(Protocol):
    layout: KVLayout
    # int64 [segments that could ever exist]: base address of each committed segment.
    segment_table: torch.Tensor

    @property
    def num_blocks(self) -> int:
        """Blocks committed: ids [0, num_blocks) may be used."""

    @property
    def rows(self) -> torch.Tensor:
        """[rows, row_elements], one row per block, layer and key or value: see ``first_row``."""

    def resize(self, num_blocks: int) -> int:
        """Commits whole segments for at least ``num_blocks``, or releases the highest ones.

        Raises whatever the device's allocator raises; the pool is then unchanged.
        """


def first_row(layout: KVLayout, block_ids: torch.Tensor) -> torch.Tensor:
    """Row of each block's keys in layer 0; same shape as ``block_ids``, int64.

    The values' row is ``blocks_per_segment`` further, the next layer's keys twice that.
    """
    per_segment = layout.blocks_per_segment
    segment = torch.div(block_ids, per_segment, rounding_mode="floor")
    return segment * (layout.num_layers * 2 * per_segment) + block_ids % per_segment


def plan_layout(
    *,
    num_layers: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
    device_kind: str,
    device_bytes: int,
) -> KVLayout:
    """Chooses the segment's size for a device of ``device_bytes``."""
    bytes_per_block = num_layers * 2 * block_size * num_kv_heads * head_size * dtype.itemsize
    if device_kind == "cpu":
        low, high = _CPU_SEGMENT_BYTES
        wanted = min(max(device_bytes // _CPU_SEGMENTS_PER_DEVICE, low), high)
        # Segments must begin at a page for their pages to be their own.
        multiple = _PAGE // math.gcd(_PAGE, bytes_per_block)
    else:
        wanted, multiple = _CUDA_SEGMENT_BYTES, 1
    blocks = max(1, wanted // bytes_per_block)
    blocks = math.ceil(blocks / multiple) * multiple
    return KVLayout(num_layers, num_kv_heads, head_size, block_size, dtype, blocks)


class CpuKVCache:
    def __init__(self, layout: KVLayout, capacity_bytes: int) -> None:
        """Reserves addresses, not memory, for ``capacity_bytes``."""
        self.layout = layout
        capacity = max(1, capacity_bytes // layout.segment_bytes)
        self._capacity = capacity
        self._mapping = mmap.mmap(
            -1,
            capacity * layout.segment_bytes,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
        )
        # Without this, huge pages would be committed across the borders of segments.
        self._mapping.madvise(mmap.MADV_NOHUGEPAGE)
        flat = torch.frombuffer(self._mapping, dtype=layout.dtype)
        self._rows = flat.view(-1, layout.row_elements)
        self._segments = flat.view(capacity, -1)
        self.segment_table = (
            torch.arange(capacity, dtype=torch.int64) * layout.segment_bytes + flat.data_ptr()
        )
        self._committed = 0

    @property
    def num_blocks(self) -> int:
        return self._committed * self.layout.blocks_per_segment

    @property
    def rows(self) -> torch.Tensor:
        return self._rows

    def resize(self, num_blocks: int) -> int:
        wanted = math.ceil(num_blocks / self.layout.blocks_per_segment)
        if wanted > self._capacity:
            raise MemoryError(
                f"{num_blocks} blocks need {wanted} segments of {self.layout.segment_bytes} bytes; "
                f"the device holds at most {self._capacity}"
            )
        if wanted > self._committed:
            self._segments[self._committed : wanted].zero_()
        elif wanted < self._committed:
            start = wanted * self.layout.segment_bytes
            length = (self._committed - wanted) * self.layout.segment_bytes
            self._mapping.madvise(mmap.MADV_DONTNEED, start, length)
        self._committed = wanted
        return self.num_blocks


class CudaKVCache:
    """Also on CPU tensors, for kernels under the interpreter."""

    def __init__(self, layout: KVLayout, capacity_bytes: int, device: torch.device) -> None:
        self.layout = layout
        capacity = max(1, capacity_bytes // layout.segment_bytes)
        self._device = device
        self._segments: list[torch.Tensor] = []
        self.segment_table = torch.zeros(capacity, dtype=torch.int64, device=device)

    @property
    def num_blocks(self) -> int:
        return len(self._segments) * self.layout.blocks_per_segment

    @property
    def rows(self) -> torch.Tensor:
        """A copy of all segments: for tests against the reference alone."""
        return torch.cat([segment.view(-1, self.layout.row_elements) for segment in self._segments])

    def resize(self, num_blocks: int) -> int:
        wanted = math.ceil(num_blocks / self.layout.blocks_per_segment)
        have = len(self._segments)
        if wanted > len(self.segment_table):
            raise MemoryError(f"{num_blocks} blocks are more than the device could hold")
        fresh = [
            torch.zeros(self.layout.segment_shape, dtype=self.layout.dtype, device=self._device)
            for _ in range(wanted - have)
        ]
        self._segments = self._segments[:wanted] + fresh
        addresses = [segment.data_ptr() for segment in fresh]
        if fresh:
            self.segment_table[have:wanted] = torch.tensor(addresses, dtype=torch.int64)
        elif wanted < have and self._device.type == "cuda":
            torch.cuda.empty_cache()
        return self.num_blocks


def build_kv_cache(layout: KVLayout, capacity_bytes: int, device: torch.device) -> KVCache:
    if device.type == "cpu":
        return CpuKVCache(layout, capacity_bytes)
    return CudaKVCache(layout, capacity_bytes, device)
