"""Chooses tokens from logits, on the device that holds them.

In: float32 logits, one row per request, with its sampling parameters and what it generated so far.
Out: a token id per row, exactly the arg-max for greedy requests, as a tensor that nobody has waited
for: everything that differs between requests is sent along, and nothing is read back. A seeded
request's tokens depend on its seed, its position and its own logits alone, never on the batch around
it. This module knows neither sequences nor memory; callers bound the number of rows.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from plimsoll_engine.logit_changes import change_logits
from plimsoll_engine.sampling_params import SamplingParams
from plimsoll_engine.transfers import indices, to_device

# Float32 logits that tokens are drawn from at once; sorting and summing take several times as much.
_DRAW_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
# Where looking at a result costs nothing, so many of the most likely tokens are put in order first:
# they nearly always hold the share that is asked for, and sorting a whole vocabulary takes ten times
# as long.
_NUCLEUS = 1024


@dataclass(frozen=True)
class RowRequest:
    """What one row of logits is wanted for."""

    params: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    # Needed with a repetition penalty alone.
    prompt_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Order:
    """How a row's tokens are put in order before one is drawn: rows of one order go together."""

    # The most likely ones alone; None: all.
    top_k: int | None
    # Without a share of the most likely, nothing depends on the order of all.
    sorted: bool


class Sampler:
    def __init__(self, seed: int) -> None:
        """``seed`` starts the draws of requests that bring no seed of their own."""
        self._random = random.Random(seed)

    def choose(self, logits: torch.Tensor, requests: Sequence[RowRequest]) -> torch.Tensor:
        """logits [rows, vocab], float32, may be changed -> int64 [rows]."""
        change_logits(logits, requests)
        chosen = logits.argmax(dim=-1)
        uniforms = {
            row: self._draw_for(request)
            for row, request in enumerate(requests)
            if not request.params.greedy
        }
        for order, rows in _by_order(requests, uniforms, logits):
            where = indices(rows, logits.device)
            chosen[where] = _draw(
                logits[where],
                chosen[where],
                order,
                [requests[row].params for row in rows],
                [uniforms[row] for row in rows],
            )
        return chosen

    def _draw_for(self, request: RowRequest) -> float:
        """A number in [0, 1)."""
        if request.params.seed is None:
            return self._random.random()
        position = len(request.output_token_ids)
        # A text seeds through SHA-512: neighbouring seeds and positions share nothing.
        return random.Random(f"{request.params.seed}/{position}").random()


def rows_at_once(vocab_size: int, device_kind: str) -> int:
    """Rows from which tokens are drawn at once: more take no more memory."""
    return max(1, _DRAW_BYTES[device_kind] // (4 * vocab_size))


def _by_order(
    requests: Sequence[RowRequest], rows: Iterable[int], logits: torch.Tensor
) -> Iterator[tuple[_Order, list[int]]]:
    """As many rows at once as ``_DRAW_BYTES`` allows."""
    vocab = logits.shape[1]
    grouped: defaultdict[_Order, list[int]] = defaultdict(list)
    for row in rows:
        params = requests[row].params
        limited = params.top_k is not None and params.top_k < vocab
        order = _Order(params.top_k if limited else None, limited or params.top_p < 1.0)
        grouped[order].append(row)
    at_once = rows_at_once(vocab, logits.device.type)
    for order, members in grouped.items():
        for start in range(0, len(members), at_once):
            yield order, members[start : start + at_once]


def _draw(
    logits: torch.Tensor,
    likeliest: torch.Tensor,
    order: _Order,
    params: Sequence[SamplingParams],
    uniforms: Sequence[float],
) -> torch.Tensor:
    """Inverse transform over the kept tokens, most likely first; ``likeliest`` [rows] where a row's
    logits are no distribution. logits [rows, vocab], not kept -> int64 [rows]."""

    def column(values: Iterable[float]) -> torch.Tensor:
        """float64 [rows, 1]"""
        return to_device(np.asarray(list(values), np.float64)[:, None], logits.device)

    # The largest becomes 0 first: divided by any temperature, it stays finite.
    scaled = logits.sub_(logits.amax(dim=-1, keepdim=True))
    scaled /= column(own.temperature for own in params).float()
    ids = None
    if order.top_k is not None:
        scaled, ids = scaled.topk(order.top_k)
    elif order.sorted:
        scaled, ids = _sort(scaled, params)
    probabilities = scaled.softmax(dim=-1)
    if any(own.min_p > 0.0 for own in params):
        least = column(own.min_p for own in params).float()
        least = least * probabilities.amax(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill_(probabilities < least, 0.0)
    cumulative = probabilities.double().cumsum(dim=-1)
    total = cumulative[:, -1:]
    if any(own.top_p < 1.0 for own in params):
        # The smallest set whose share reaches top_p.
        share = column(own.top_p for own in params)
        last = torch.searchsorted(cumulative, share * total)
        reached = cumulative.gather(1, last.clamp_(max=cumulative.shape[1] - 1))
        total = torch.where(share < 1.0, reached, total)
    places = torch.searchsorted(cumulative, column(uniforms) * total, right=True)
    # A total that is no number is below nothing: the search ends behind the last token.
    nowhere = places == cumulative.shape[1]
    places = places.masked_fill(nowhere, 0)
    drawn = places if ids is None else ids.gather(1, places)
    return torch.where(nowhere, likeliest[:, None], drawn)[:, 0]


def _sort(
    scaled: torch.Tensor, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely first, of equals the lower id: [rows, vocab] and their ids. Or as many as
    surely hold every row's top_p, and behind them one value that stands for all others."""
    short = scaled.device.type == "cpu" and scaled.shape[1] > _NUCLEUS
    # min_p compares single tokens with the largest, which the others together are not.
    if short and all(own.min_p == 0.0 for own in params):
        ids = scaled.topk(_NUCLEUS, sorted=False).indices.sort().values
        values, places = scaled.gather(1, ids).sort(descending=True, stable=True)
        ids = ids.gather(1, places)
        others = scaled.scatter(1, ids, -torch.inf).logsumexp(dim=-1, keepdim=True)
        shortened = torch.cat((values, others), dim=1)
        shares = shortened.softmax(dim=-1).double()
        # Of those as likely as the last, more may be among the others.
        sure = shares[:, :-1].masked_fill(values == values[:, -1:], 0.0).sum(dim=-1)
        wanted = torch.tensor([own.top_p for own in params], dtype=torch.float64)
        # No number is more than any: such a row wants all.
        if bool((sure > wanted * shares.sum(dim=-1)).all()):
            return shortened, torch.cat((ids, ids[:, :1]), dim=1)
    ordered = scaled.sort(descending=True, stable=True)
    return ordered.values, ordered.indices
