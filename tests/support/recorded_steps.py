"""Recorded decode steps without a GPU: a recorder that runs the work anew, on tensors that stay.

A replay may look at nothing but tensors, as a CUDA graph does: :class:`TensorAttention` reads slots,
block tables and context lengths out of them and never the host's own figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from plimsoll_engine.attention_batch import AttentionBatch
from plimsoll_engine.config import EngineConfig
from plimsoll_engine.device import CpuDevice
from plimsoll_engine.host_memory import memory_limit
from plimsoll_engine.kv_cache import KVCache, first_row
from plimsoll_engine.model_runner import ModelRunner
from plimsoll_engine.models.config import LayerAttention


class Rerunner:
    """A device.Recorder. ``fail_at``: number of the recording that finds no memory."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.recorded = 0
        self.replayed = 0
        self._fail_at = fail_at

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        if self.recorded == self._fail_at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.recorded += 1
        work()

        def replay() -> None:
            self.replayed += 1
            work()

        return replay


class RecordingDevice(CpuDevice):
    """A CPU on which decode steps are recorded."""

    def __init__(self, config: EngineConfig, recorder: Rerunner) -> None:
        super().__init__(memory_limit(config.device_memory, config.memory_limit))
        self._recorder = recorder

    def recorder(self) -> Rerunner:  # type: ignore[override]
        return self._recorder


class TensorAttention:
    """Plain attention by what the tensors say, sequence by sequence; decode steps alone."""

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
        layout, own = self._cache.layout, self._layers[layer]
        size, per_segment = layout.block_size, layout.blocks_per_segment
        rows = self._cache.rows.view(-1, size, layout.num_kv_heads, layout.head_size)
        for token, slot in enumerate(self._slots.tolist()):
            if slot >= 0:
                block = int(first_row(layout, torch.tensor(slot // size))) + 2 * layer * per_segment
                rows[block, slot % size] = key[token]
                rows[block + per_segment, slot % size] = value[token]
        out = torch.zeros_like(query)
        group = query.shape[1] // layout.num_kv_heads
        for sequence, length in enumerate(self._batch.context_lens_tensor.tolist()):
            if length == 0:
                continue
            table = self._batch.block_tables[sequence, : -(-length // size)].long()
            blocks = first_row(layout, table) + 2 * layer * per_segment
            first = 0 if own.sliding_window is None else max(0, length - own.sliding_window)
            keys = rows[blocks].flatten(0, 1)[first:length].repeat_interleave(group, 1)
            values = rows[blocks + per_segment].flatten(0, 1)[first:length]
            scores = torch.einsum("hd,thd->ht", query[sequence], keys) * own.scale
            weights = scores.softmax(-1)
            out[sequence] = torch.einsum("ht,thd->hd", weights, values.repeat_interleave(group, 1))
        return out


def recording_runner(config: EngineConfig, recorder: Rerunner, monkeypatch: object) -> ModelRunner:
    """A ModelRunner whose decode steps are recorded by ``recorder``; loaded."""
    from plimsoll_engine import model_runner
    from plimsoll_engine.attention import build_attention

    def build(
        cache: KVCache,
        batch: AttentionBatch,
        slots: torch.Tensor,
        layers: Sequence[LayerAttention],
    ) -> object:
        # A recorded batch is the one whose context lengths the host does not know.
        kind = build_attention if all(batch.context_lens) else TensorAttention
        return kind(cache, batch, slots, layers)

    monkeypatch.setattr(model_runner, "build_attention", build)  # type: ignore[attr-defined]
    monkeypatch.setattr(  # type: ignore[attr-defined]
        model_runner,
        "open_device",
        lambda *_: RecordingDevice(config, recorder),
    )
    runner = ModelRunner(config, "cpu")
    runner.load()
    return runner
