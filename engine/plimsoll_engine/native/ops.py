"""Calls the native kernels with tensors. Same signatures as ``reference`` and ``ops``.

In: float32 or bfloat16 tensors on the CPU whose last dimension is contiguous; ``find_kernels`` gives
None for other types and where no library could be compiled. Shapes are the decoder's and not checked
again: what the kernels read and write follows from them alone.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from plimsoll_engine.attention_batch import AttentionBatch
from plimsoll_engine.kv_cache import KVCache
from plimsoll_engine.models.config import LayerAttention
from plimsoll_engine.native.library import load_library

Tensor = torch.Tensor

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_KINDS: dict[str, Any] = {"p": ctypes.c_void_p, "l": ctypes.c_long, "f": ctypes.c_float}
# Arguments by kind: addresses, integers, float32.
_SIGNATURES = {
    "rms_norm": "ppppp" + "l" * 5 + "f",
    "rotary": "pppppp" + "l" * 8,
    "silu_and_mul": "pplll",
    "kv_write": "pppp" + "l" * 9,
    "paged_attention": "pppppp" + "l" * 6 + "ff" + "l" * 6,
}


class NativeKernels:
    """Those of one type."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        def find(stem: str) -> Any:
            function = library[f"{stem}_{name}"]
            function.argtypes = [_KINDS[kind] for kind in _SIGNATURES[stem]]
            function.restype = None
            return function

        self._rms_norm = find("rms_norm")
        self._rotary = find("rotary")
        self._silu_and_mul = find("silu_and_mul")
        self._kv_write = find("kv_write")
        self._paged_attention = find("paged_attention")

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        groups, size = (1 if x.ndim == 2 else x.shape[1]), x.shape[-1]
        out = torch.empty(x.shape, dtype=x.dtype)
        self._rms_norm(
            *(out.data_ptr(), None, x.data_ptr(), None, weight.data_ptr()),
            *(x.shape[0], groups, size, x.stride(0), 0 if x.ndim == 2 else x.stride(1)),
            epsilon,
        )
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        tokens, size = x.shape
        out = torch.empty(x.shape, dtype=x.dtype)
        total = torch.empty(x.shape, dtype=x.dtype)
        self._rms_norm(
            *(out.data_ptr(), total.data_ptr(), x.data_ptr(), residual.data_ptr()),
            *(weight.data_ptr(), tokens, 1, size, x.stride(0), 0, epsilon),
        )
        return out, total

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        tokens, heads, head_size = query.shape
        turned_query = torch.empty(query.shape, dtype=query.dtype)
        turned_key = torch.empty(key.shape, dtype=key.dtype)
        self._rotary(
            *(turned_query.data_ptr(), turned_key.data_ptr(), query.data_ptr(), key.data_ptr()),
            *(cos.data_ptr(), sin.data_ptr(), tokens, heads, key.shape[1], head_size // 2),
            *(query.stride(0), query.stride(1), key.stride(0), key.stride(1)),
        )
        return turned_query, turned_key

    def silu_and_mul(self, x: Tensor) -> Tensor:
        tokens, width = x.shape
        out = torch.empty((tokens, width // 2), dtype=x.dtype)
        self._silu_and_mul(out.data_ptr(), x.data_ptr(), tokens, width // 2, x.stride(0))
        return out

    def kv_write(
        self, key: Tensor, value: Tensor, cache: KVCache, layer: int, slots: Tensor
    ) -> None:
        key, value = _heads_together(key), _heads_together(value)
        self._kv_write(
            *(cache.rows.data_ptr(), key.data_ptr(), value.data_ptr(), slots.data_ptr()),
            *(len(slots), key.stride(0), value.stride(0), *_place(cache, layer)),
        )

    def paged_attention(
        self,
        query: Tensor,
        cache: KVCache,
        layer: int,
        batch: AttentionBatch,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        out = torch.empty(query.shape, dtype=query.dtype)
        tables = batch.block_tables
        self._paged_attention(
            *(cache.rows.data_ptr(), out.data_ptr(), query.data_ptr(), tables.data_ptr()),
            *(batch.query_starts.data_ptr(), batch.context_lens_tensor.data_ptr()),
            *(len(batch.query_lens), query.shape[1], tables.stride(0)),
            *(query.stride(0), query.stride(1), sliding_window or 0, scale, soft_cap or 0.0),
            *_place(cache, layer),
        )
        return out


class NativeAttention:
    """A decoder's ``Attention``."""

    def __init__(
        self,
        kernels: NativeKernels,
        cache: KVCache,
        batch: AttentionBatch,
        slots: Tensor,
        layers: Sequence[LayerAttention],
    ) -> None:
        self._kernels = kernels
        self._cache = cache
        self._batch = batch
        self._slots = slots
        self._layers = layers

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._kernels.kv_write(key, value, self._cache, layer, self._slots)
        own = self._layers[layer]
        return self._kernels.paged_attention(
            query, self._cache, layer, self._batch, own.scale, own.sliding_window, own.soft_cap
        )


@functools.cache
def find_kernels(dtype: torch.dtype) -> NativeKernels | None:
    library = load_library() if dtype in _NAMES else None
    return None if library is None else NativeKernels(library, _NAMES[dtype])


def _heads_together(x: Tensor) -> Tensor:
    return x if x.stride(1) == x.shape[2] and x.stride(2) == 1 else x.contiguous()


def _place(cache: KVCache, layer: int) -> tuple[int, ...]:
    layout = cache.layout
    return (
        *(layout.num_layers, layer, layout.blocks_per_segment),
        *(layout.block_size, layout.num_kv_heads, layout.head_size),
    )
