"""The device alone and the attention kernels on it: copy, matrix product, decode, prefill.

In: a Scale. Out: figures. On a device the work is recorded once and replayed, so that launching it is
not part of the time; under the interpreter it runs as it is.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpu_scale import Decode, Scale

from plimsoll_engine.attention_batch import build_attention_batch
from plimsoll_engine.device import CudaRecorder
from plimsoll_engine.kv_cache import CudaKVCache, KVLayout, plan_layout
from plimsoll_engine.models.config import DTYPES

_BLOCK_SIZE = 16


class Stopwatch:
    def __init__(self, device: torch.device, repeats: int) -> None:
        self._device = device
        self._repeats = repeats

    def seconds(self, work: Callable[[], object]) -> float:
        """Of one ``work``: the median of three series."""
        replay = self._prepare(work)
        return statistics.median(self._series(replay) for _ in range(3)) / self._repeats

    def _prepare(self, work: Callable[[], object]) -> Callable[[], None]:
        def series() -> None:
            for _ in range(self._repeats):
                work()

        if self._device.type == "cpu":
            return series
        return CudaRecorder(self._device).record(series)

    def _series(self, replay: Callable[[], None]) -> float:
        if self._device.type == "cpu":
            start = time.perf_counter()
            replay()
            return time.perf_counter() - start
        begun = torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True)
        begun.record()
        replay()
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1000.0


def measure_device(scale: Scale) -> dict[str, Any]:
    """Bytes a second of a copy, read and write counted, and operations a second of a matrix product."""
    device = torch.device(scale.kind)
    stopwatch = Stopwatch(device, scale.repeats)
    source = torch.zeros(scale.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = stopwatch.seconds(lambda: target.copy_(source))
    size, dtype = scale.matmul_size, DTYPES[scale.dtype]
    left = torch.randn(size, size, device=device).to(dtype)
    product = torch.empty_like(left)
    multiplying = stopwatch.seconds(lambda: torch.mm(left, left, out=product))
    return {
        "name": torch.cuda.get_device_name(device) if scale.kind == "cuda" else "cpu",
        "copy_bytes_per_second": 2 * scale.copy_bytes / copying,
        "matmul_flops": 2 * size**3 / multiplying,
    }


def measure_decode(scale: Scale, copy_bandwidth: float) -> list[dict[str, Any]]:
    """Keys and values that decode attention reads a second, as a share of the copy."""
    return [_decode(scale, case, copy_bandwidth) for case in scale.decodes]


def _decode(scale: Scale, case: Decode, copy_bandwidth: float) -> dict[str, Any]:
    from plimsoll_engine.ops.paged_attention import paged_attention
    from plimsoll_engine.ops.split_attention import is_split

    device = torch.device(scale.kind)
    heads, kv_heads, head_size = scale.attention
    blocks_each = math.ceil(case.context / _BLOCK_SIZE)
    layout, cache = _cache(scale, case.batch * blocks_each)
    scattered = torch.randperm(
        case.batch * blocks_each, generator=torch.Generator().manual_seed(0)
    ).view(case.batch, blocks_each)
    batch = build_attention_batch(
        [1] * case.batch, [case.context] * case.batch, scattered.tolist(), device
    )
    query = torch.randn(case.batch, heads, head_size, device=device).to(layout.dtype)
    scale_by = head_size**-0.5
    seconds = Stopwatch(device, scale.repeats).seconds(
        lambda: paged_attention(query, cache, 0, batch, scale_by)
    )
    read = case.batch * case.context * 2 * kv_heads * head_size * layout.dtype.itemsize
    return {
        "batch": case.batch,
        "context": case.context,
        "split": is_split(batch, kv_heads),
        "seconds": seconds,
        "bytes_per_second": read / seconds,
        "share_of_copy": read / seconds / copy_bandwidth,
    }


def measure_prefill(scale: Scale) -> list[dict[str, Any]]:
    """Operations a second of causal prefill attention beside torch's scaled dot product attention."""
    return [_prefill(scale, length) for length in scale.prefills]


def _prefill(scale: Scale, length: int) -> dict[str, Any]:
    from plimsoll_engine.ops.paged_attention import paged_attention

    device = torch.device(scale.kind)
    heads, kv_heads, head_size = scale.attention
    blocks = math.ceil(length / _BLOCK_SIZE)
    layout, cache = _cache(scale, blocks)
    batch = build_attention_batch([length], [length], [range(blocks)], device)

    def rows(count: int) -> torch.Tensor:
        return torch.randn(length, count, head_size, device=device).to(layout.dtype)

    query, key, value = rows(heads), rows(kv_heads), rows(kv_heads)
    stopwatch = Stopwatch(device, scale.repeats)
    scale_by = head_size**-0.5
    ours = stopwatch.seconds(lambda: paged_attention(query, cache, 0, batch, scale_by))
    # [1, heads, length, head_size]
    queries, keys, values = (
        tensor.transpose(0, 1)[None].contiguous() for tensor in (query, key, value)
    )
    theirs = stopwatch.seconds(
        lambda: F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        )
    )
    # Scores and weighted values: two products over the half that is seen.
    operations = 2 * 2 * heads * head_size * length * (length + 1) // 2
    return {
        "length": length,
        "flops": operations / ours,
        "sdpa_flops": operations / theirs,
        "share_of_sdpa": theirs / ours,
    }


def _cache(scale: Scale, num_blocks: int) -> tuple[KVLayout, CudaKVCache]:
    """One layer in segments of their own, filled at random: zeros would cost less power."""
    from plimsoll_engine.ops.kv_write import kv_write

    _, kv_heads, head_size = scale.attention
    layout = plan_layout(
        num_layers=1,
        num_kv_heads=kv_heads,
        head_size=head_size,
        block_size=_BLOCK_SIZE,
        dtype=DTYPES[scale.dtype],
        device_kind="cuda",
        device_bytes=0,
    )
    capacity = math.ceil(num_blocks / layout.blocks_per_segment) * layout.segment_bytes
    cache = CudaKVCache(layout, capacity, torch.device(scale.kind))
    cache.resize(num_blocks)
    slots = torch.arange(num_blocks * _BLOCK_SIZE, device=cache.segment_table.device)
    rows = torch.randn(len(slots), kv_heads, head_size, device=slots.device).to(layout.dtype)
    kv_write(rows, rows, cache, 0, slots)
    return layout, cache
