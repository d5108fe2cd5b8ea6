"""Turns a scheduled batch into the tensors that the decoder reads, and lists the rows it must give.

In: a :class:`StepBatch`. Out: token ids, positions, slots and where the sequences lie; then, per
row of hidden states that is wanted, what for. It knows neither the model nor the sampler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from plimsoll_engine.attention_batch import AttentionBatch, build_attention_batch
from plimsoll_engine.executor import SequenceChunk, StepBatch
from plimsoll_engine.transfers import to_device


@dataclass(frozen=True)
class StepInputs:
    # int64 [tokens] each.
    token_ids: torch.Tensor
    positions: torch.Tensor
    # block id x block size + place in the block
    slots: torch.Tensor
    attention: AttentionBatch


@dataclass(frozen=True)
class WantedRow:
    """A row of hidden states whose logits are needed: to sample a successor (``next_token`` None)
    or for the log-probability of the prompt token that follows."""

    row: int
    chunk: SequenceChunk
    next_token: int | None = None


def build_step_inputs(batch: StepBatch, block_size: int, device: torch.device) -> StepInputs:
    """``positions`` of a chunk are [start, start + tokens), whatever came before in other steps."""
    token_ids, positions, slots = [], [], []
    for chunk in batch.chunks:
        at = np.arange(chunk.start, chunk.start + len(chunk.token_ids), dtype=np.int64)
        blocks = np.asarray(chunk.block_ids, dtype=np.int64)
        token_ids.append(np.asarray(chunk.token_ids, dtype=np.int64))
        positions.append(at)
        slots.append(blocks[at // block_size] * block_size + at % block_size)

    def tensor(parts: list[np.ndarray]) -> torch.Tensor:
        return to_device(np.concatenate(parts), device)

    return StepInputs(
        token_ids=tensor(token_ids),
        positions=tensor(positions),
        slots=tensor(slots),
        attention=build_attention_batch(
            [len(chunk.token_ids) for chunk in batch.chunks],
            [chunk.start + len(chunk.token_ids) for chunk in batch.chunks],
            [chunk.block_ids for chunk in batch.chunks],
            device,
        ),
    )


def wanted_rows(batch: StepBatch) -> Iterator[WantedRow]:
    """In the batch's order; a chunk's prompt rows come before its sampled one."""
    start = 0
    for chunk in batch.chunks:
        for offset in range(*chunk.prompt_logprob_rows):
            following = chunk.start + offset + 1
            yield WantedRow(start + offset, chunk, chunk.prompt_token_ids[following])
        start += len(chunk.token_ids)
        if chunk.sampling is not None:
            yield WantedRow(start - 1, chunk)
