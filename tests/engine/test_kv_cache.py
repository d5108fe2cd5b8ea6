"""Segments: what is committed is really there, what is released really goes, blocks stay put."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace

import pytest
import torch

from plimsoll_engine import host_memory
from plimsoll_engine.kv_cache import (
    CpuKVCache,
    CudaKVCache,
    KVCache,
    KVLayout,
    build_kv_cache,
    first_row,
    plan_layout,
)
from plimsoll_engine.reference.kv_write import kv_write

MIB = 1 << 20
# 1 MiB per block, 4 MiB per segment.
LAYOUT = KVLayout(
    num_layers=8, num_kv_heads=4, head_size=64, block_size=64, dtype=torch.float32,
    blocks_per_segment=4,
)  # fmt: skip
assert LAYOUT.bytes_per_block == MIB


def test_pool_moves_by_whole_segments() -> None:
    cache = CpuKVCache(LAYOUT, 64 * MIB)
    assert cache.num_blocks == 0
    assert cache.resize(1) == 4
    assert cache.resize(4) == 4
    assert cache.resize(9) == 12
    assert cache.resize(3) == 4
    assert cache.resize(0) == 0


def test_committed_memory_is_resident_and_released_memory_is_not() -> None:
    cache = CpuKVCache(LAYOUT, 256 * MIB)
    before = host_memory.used_bytes()
    cache.resize(128)
    grown = host_memory.used_bytes() - before
    assert 128 * MIB <= grown < 130 * MIB
    cache.resize(64)
    shrunk = host_memory.used_bytes() - before
    assert 64 * MIB <= shrunk < 66 * MIB
    cache.resize(0)
    assert host_memory.used_bytes() - before < 2 * MIB


def test_growth_beyond_the_reservation_is_refused() -> None:
    cache = CpuKVCache(LAYOUT, 8 * MIB)
    cache.resize(8)
    with pytest.raises(MemoryError):
        cache.resize(9)
    assert cache.num_blocks == 8


def tokens_of(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 4, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["cpu", "segments"])
def test_blocks_keep_their_content_while_the_pool_moves(kind: str) -> None:
    cache: KVCache = (
        CpuKVCache(LAYOUT, 64 * MIB)
        if kind == "cpu"
        else CudaKVCache(LAYOUT, 64 * MIB, torch.device("cpu"))
    )
    cache.resize(8)
    # The last slot of block 3, the first of block 4: the border of two segments.
    slots = torch.tensor([3 * 64 + 63, 4 * 64])
    key, value = tokens_of(2, 1), tokens_of(2, 2)
    if kind == "cpu":
        kv_write(key, value, cache, 5, slots)
    else:
        # Written as a kernel does: through the table of addresses.
        write_through_table(cache, 5, slots, key, value)
    for size in (20, 12, 5, 30):
        cache.resize(size)
        rows = first_row(LAYOUT, slots // 64) + 2 * 5 * LAYOUT.blocks_per_segment
        keys = cache.rows[rows].view(2, 64, 4, 64)
        values = cache.rows[rows + LAYOUT.blocks_per_segment].view(2, 64, 4, 64)
        assert torch.equal(keys[[0, 1], slots % 64], key)
        assert torch.equal(values[[0, 1], slots % 64], value)


def write_through_table(
    cache: KVCache, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    for slot, both in zip(slots.tolist(), zip(key, value, strict=True), strict=True):
        block, place = divmod(slot, LAYOUT.block_size)
        segment, within = divmod(block, LAYOUT.blocks_per_segment)
        for plane, vector in enumerate(both):
            row = (2 * layer + plane) * LAYOUT.blocks_per_segment + within
            offset = (row * LAYOUT.block_size + place) * vector.nbytes
            address = int(cache.segment_table[segment]) + offset
            ctypes.memmove(address, vector.contiguous().data_ptr(), vector.nbytes)


def test_address_table_follows_the_segments() -> None:
    cache = CpuKVCache(LAYOUT, 64 * MIB)
    distances = cache.segment_table.diff().unique()
    assert distances.tolist() == [LAYOUT.segment_bytes]
    assert int(cache.segment_table[0]) == cache.rows.data_ptr()


@pytest.mark.parametrize("head_size", [8, 24, 64, 80])
@pytest.mark.parametrize("device_bytes", [64 * MIB, 2 << 30, 1 << 37])
def test_planned_segments_are_whole_pages_and_small_beside_the_device(
    head_size: int, device_bytes: int
) -> None:
    layout = plan_layout(
        num_layers=3,
        num_kv_heads=1,
        head_size=head_size,
        block_size=16,
        dtype=torch.float32,
        device_kind="cpu",
        device_bytes=device_bytes,
    )
    assert layout.segment_bytes % mmap.PAGESIZE == 0
    assert layout.segment_bytes <= max(device_bytes // 128, 1 << 19)
    assert isinstance(build_kv_cache(layout, device_bytes, torch.device("cpu")), CpuKVCache)


def test_bytes_per_block_count_keys_and_values_of_all_layers() -> None:
    assert LAYOUT.bytes_per_block == 8 * 2 * 64 * 4 * 64 * 4
    assert replace(LAYOUT, dtype=torch.float16).bytes_per_block == LAYOUT.bytes_per_block // 2
