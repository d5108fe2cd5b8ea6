"""Keeps a step's keys and values and attends, with the implementation that fits the device.

In: a KV cache and where a step's sequences lie. Out: the decoder's ``Attention``. On CUDA the
Triton kernels run, on the CPU native ones; where these are missing, the plain-torch twins of both,
whose index tensors are the same for every layer that sees the same window and are made once per step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plimsoll_engine.attention_batch import AttentionBatch
from plimsoll_engine.config import CacheDType
from plimsoll_engine.kv_cache import KVCache
from plimsoll_engine.models.config import LayerAttention
from plimsoll_engine.models.decoder import Attention
from plimsoll_engine.native.ops import NativeAttention, find_kernels
from plimsoll_engine.reference import kv_write as kv_write_reference
from plimsoll_engine.reference import paged_attention as paged_attention_reference
from plimsoll_engine.termination import EngineFailure, FailureClass, Phase


def choose_cache_dtype(asked: CacheDType, computed: torch.dtype) -> torch.dtype:
    """Raises EngineFailure for what neither implementation can store: both keep keys and values as
    they are computed."""
    name = str(computed).removeprefix("torch.")
    if asked not in (CacheDType.AUTO, name):
        raise EngineFailure(
            FailureClass.INVALID_CONFIGURATION,
            Phase.CONFIGURATION,
            f"--kv-cache-dtype {asked}: keys and values are stored in the dtype that the model "
            f"computes in, which is {name}; allowed: auto, {name}",
            suggestion={"flag": "--kv-cache-dtype", "value": CacheDType.AUTO.value},
        )
    return computed


class TorchAttention:
    def __init__(
        self,
        cache: KVCache,
        batch: AttentionBatch,
        slots: torch.Tensor,
        layers: Sequence[LayerAttention],
    ) -> None:
        """``slots`` int64 [tokens]: block id x block size + place in the block."""
        layout = cache.layout
        self._layout = layout
        self._rows = cache.rows
        self._layers = layers
        self._token_rows = kv_write_reference.token_rows(layout, slots)
        plans = {
            window: paged_attention_reference.plan_gather(batch, layout, layout.dtype, window)
            for window in {own.sliding_window for own in layers}
        }
        self._plans = [plans[own.sliding_window] for own in layers]

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        kv_write_reference.store(key, value, self._rows, self._layout, layer, self._token_rows)
        own = self._layers[layer]
        return paged_attention_reference.attend(
            query, self._rows, self._layout, layer, self._plans[layer], own.scale, own.soft_cap
        )


class TritonAttention:
    def __init__(
        self,
        cache: KVCache,
        batch: AttentionBatch,
        slots: torch.Tensor,
        layers: Sequence[LayerAttention],
    ) -> None:
        self._cache = cache
        self._batch = batch
        self._slots = slots
        self._layers = layers

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        # Imported here: Triton is not there on every machine that runs the CPU path.
        from plimsoll_engine.ops.kv_write import kv_write
        from plimsoll_engine.ops.paged_attention import paged_attention

        kv_write(key, value, self._cache, layer, self._slots)
        own = self._layers[layer]
        return paged_attention(
            query,
            self._cache,
            layer,
            self._batch,
            own.scale,
            own.sliding_window,
            own.soft_cap,
        )


def build_attention(
    cache: KVCache,
    batch: AttentionBatch,
    slots: torch.Tensor,
    layers: Sequence[LayerAttention],
) -> Attention:
    if slots.device.type != "cpu":
        return TritonAttention(cache, batch, slots, layers)
    kernels = find_kernels(cache.layout.dtype)
    if kernels is None:
        return TorchAttention(cache, batch, slots, layers)
    return NativeAttention(kernels, cache, batch, slots, layers)
