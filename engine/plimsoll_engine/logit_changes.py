"""What requests change in their logits before a token is chosen: bias, penalties, forbidden ends.

In: float32 logits [rows, vocab] and one request per row. Out: the logits, changed in place. A change
is a list of cells (row, token) with a value each: made on the host, sent once, applied to all rows
together. The order of the changes is that of the functions in ``change_logits``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from plimsoll_engine.transfers import to_device

if TYPE_CHECKING:
    from plimsoll_engine.sampling import RowRequest


@dataclass(frozen=True)
class _Change:
    """Tokens of one row, each once, and a value for all or for each of them."""

    token_ids: Sequence[int] | np.ndarray
    values: Sequence[float] | np.ndarray | float


def change_logits(logits: torch.Tensor, requests: Sequence[RowRequest]) -> None:
    _apply(logits, map(_bias, requests), torch.add)
    _apply(logits, map(_repetition, requests), _repel)
    _apply(logits, map(_presence, requests), torch.sub)
    # Last: no arithmetic makes a forbidden token possible again.
    _apply(logits, map(_forbidden, requests), lambda _, values: values)


def _apply(
    logits: torch.Tensor,
    changes: Iterable[_Change | None],
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """``change``: what is in the cells and their values -> what is to be there."""
    cells, values = [], []
    for row, own in enumerate(changes):
        if own is not None:
            ids = np.asarray(own.token_ids, np.int64)
            cells.append(ids + row * logits.shape[1])
            values.append(np.broadcast_to(np.asarray(own.values, np.float32), ids.shape))
    if not cells:
        return
    where = to_device(np.concatenate(cells), logits.device)
    what = to_device(np.concatenate(values), logits.device)
    flat = logits.view(-1)
    flat.index_copy_(0, where, change(flat[where], what))


def _bias(request: RowRequest) -> _Change | None:
    bias = request.params.logit_bias
    return _Change(*zip(*bias, strict=True)) if bias else None


def _repetition(request: RowRequest) -> _Change | None:
    penalty = request.params.repetition_penalty
    seen = {*request.prompt_token_ids, *request.output_token_ids} if penalty != 1.0 else ()
    return _Change(sorted(seen), penalty) if seen else None


def _repel(logits: torch.Tensor, penalties: torch.Tensor) -> torch.Tensor:
    return torch.where(logits > 0, logits / penalties, logits * penalties)


def _presence(request: RowRequest) -> _Change | None:
    params, output = request.params, request.output_token_ids
    if not output or not (params.presence_penalty or params.frequency_penalty):
        return None
    ids, counts = np.unique(output, return_counts=True)
    frequency = np.float32(params.frequency_penalty) * counts.astype(np.float32)
    return _Change(ids, np.float32(params.presence_penalty) + frequency)


def _forbidden(request: RowRequest) -> _Change | None:
    params = request.params
    # A grammar says itself where the end is: where nothing but an end may follow, it does.
    if len(request.output_token_ids) >= params.min_tokens or params.grammar is not None:
        return None
    ends = sorted(params.eos_token_ids | params.stop_token_ids)
    return _Change(ends, float("-inf")) if ends else None
