"""Where the sequences of one step lie: what both attention implementations read.

In: per sequence, the number of query tokens in this step, the context length after it and the
block ids. Out: the same as plain integers and as tensors on the device. It knows neither models
nor the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from plimsoll_engine.transfers import to_device


@dataclass(frozen=True)
class AttentionBatch:
    """The query tokens of all sequences are flattened, one sequence after the other.

    The last query of a sequence stands at position ``context_len - 1``; each sees itself and what
    is before it.
    """

    query_lens: tuple[int, ...]
    # Kernels read the tensor below instead: in a recorded step only that is refreshed.
    context_lens: tuple[int, ...]
    # int32 [sequences, longest table]: block ids, padded with ids that are not read.
    block_tables: torch.Tensor
    # int32 [sequences + 1]: where each sequence's queries begin; the total at the end.
    query_starts: torch.Tensor
    # int32 [sequences]; 0 for a row that fills up a recorded batch.
    context_lens_tensor: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)


def build_attention_batch(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_ids: Sequence[Sequence[int]],
    device: torch.device,
) -> AttentionBatch:
    """Checks that every sequence has queries and at least as much context."""
    starts = [0]
    for query_len, context_len in zip(query_lens, context_lens, strict=True):
        if not 1 <= query_len <= context_len:
            raise ValueError(f"{query_len} query tokens with a context of {context_len}")
        starts.append(starts[-1] + query_len)
    width = max(len(ids) for ids in block_ids)
    tables = [[*ids, *([ids[-1]] * (width - len(ids)))] for ids in block_ids]

    def tensor(values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return to_device(np.asarray(values, dtype=np.int32), device)

    return AttentionBatch(
        query_lens=tuple(query_lens),
        context_lens=tuple(context_lens),
        block_tables=tensor(tables),
        query_starts=tensor(starts),
        context_lens_tensor=tensor(context_lens),
    )
