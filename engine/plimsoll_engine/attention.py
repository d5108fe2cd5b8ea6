"""Keeps a step's keys and values and attends, with the implementation that fits the device.

In: a KV cache and where a step's sequences lie. Out: the decoder's ``Attention``. On CUDA the
Triton kernels run, on the CPU their plain-torch twins, whose index tensors are the same for every
layer that sees the same window and are made once per step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plimsoll_engine.attention_batch import AttentionBatch
from plimsoll_engine.kv_cache import KVCache
from plimsoll_engine.models.decoder import Attention
from plimsoll_engine.reference import kv_write as kv_write_reference
from plimsoll_engine.reference import paged_attention as paged_attention_reference


class TorchAttention:
    def __init__(
        self,
        cache: KVCache,
        batch: AttentionBatch,
        slots: torch.Tensor,
        scale: float,
        sliding_windows: Sequence[int | None],
    ) -> None:
        """``slots`` int64 [tokens]: block id x block size + place in the block."""
        layout = cache.layout
        self._layout = layout
        self._rows = cache.rows
        self._scale = scale
        self._token_rows = kv_write_reference.token_rows(layout, slots)
        plans = {
            window: paged_attention_reference.plan_gather(batch, layout, layout.dtype, window)
            for window in set(sliding_windows)
        }
        self._plans = [plans[window] for window in sliding_windows]

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        kv_write_reference.store(key, value, self._rows, self._layout, layer, self._token_rows)
        return paged_attention_reference.attend(
            query, self._rows, self._layout, layer, self._plans[layer], self._scale
        )


class TritonAttention:
    def __init__(
        self,
        cache: KVCache,
        batch: AttentionBatch,
        slots: torch.Tensor,
        scale: float,
        sliding_windows: Sequence[int | None],
    ) -> None:
        self._cache = cache
        self._batch = batch
        self._slots = slots
        self._scale = scale
        self._sliding_windows = sliding_windows

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        # Imported here: Triton is not there on every machine that runs the CPU path.
        from plimsoll_engine.ops.kv_write import kv_write
        from plimsoll_engine.ops.paged_attention import paged_attention

        kv_write(key, value, self._cache, layer, self._slots)
        return paged_attention(
            query, self._cache, layer, self._batch, self._scale, self._sliding_windows[layer]
        )


def build_attention(
    cache: KVCache,
    batch: AttentionBatch,
    slots: torch.Tensor,
    scale: float,
    sliding_windows: Sequence[int | None],
) -> Attention:
    """``sliding_windows`` has an entry for every layer: how many positions a token sees, or None
    for all."""
    kind = TorchAttention if slots.device.type == "cpu" else TritonAttention
    return kind(cache, batch, slots, scale, sliding_windows)
