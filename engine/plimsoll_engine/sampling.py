"""Chooses tokens from logits, and tells log-probabilities.

In: float32 logits, one row per request, with its sampling parameters and what it generated so far.
Out: a token id per row, exactly the arg-max for greedy requests, and the log-probabilities asked
for (of the model's own distribution, before any change). A seeded request's tokens depend on its
seed, its position and its own logits alone, never on the batch around it. This module knows neither
sequences nor memory; callers bound the number of rows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from plimsoll_engine.executor import TokenLogprob
from plimsoll_engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class RowRequest:
    """What one row of logits is wanted for."""

    params: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    # Needed with a repetition penalty alone.
    prompt_token_ids: tuple[int, ...] = ()
    # Needed with a grammar alone.
    request_id: str = ""


class Sampler:
    def __init__(self, seed: int) -> None:
        """``seed`` starts the draws of requests that bring no seed of their own."""
        self._random = random.Random(seed)

    def choose(self, logits: torch.Tensor, requests: Sequence[RowRequest]) -> list[int]:
        """logits [rows, vocab], float32, may be changed; one token id per row."""
        for row, request in zip(logits, requests, strict=True):
            _apply_constraints(row, request)
        chosen = logits.argmax(dim=-1).tolist()
        for index, request in enumerate(requests):
            if not request.params.greedy:
                chosen[index] = _draw(logits[index], request.params, self._draw_for(request))
        return chosen

    def _draw_for(self, request: RowRequest) -> float:
        """A number in [0, 1)."""
        if request.params.seed is None:
            return self._random.random()
        position = len(request.output_token_ids)
        # A text seeds through SHA-512: neighbouring seeds and positions share nothing.
        return random.Random(f"{request.params.seed}/{position}").random()


def _apply_constraints(row: torch.Tensor, request: RowRequest) -> None:
    """Bias, penalties and forbidden ends, in place on one row [vocab]."""
    params = request.params
    if params.logit_bias:
        ids = torch.tensor([token for token, _ in params.logit_bias], device=row.device)
        row[ids] += torch.tensor([bias for _, bias in params.logit_bias], device=row.device)
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(
            sorted({*request.prompt_token_ids, *request.output_token_ids}), device=row.device
        )
        values = row[seen]
        row[seen] = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if (params.presence_penalty or params.frequency_penalty) and request.output_token_ids:
        ids, counts = torch.tensor(request.output_token_ids, device=row.device).unique(
            return_counts=True
        )
        row[ids] -= params.presence_penalty + params.frequency_penalty * counts
    # Last: no arithmetic makes a forbidden token possible again.
    # A grammar says itself where the end is: where nothing but an end may follow, it does.
    if len(request.output_token_ids) < params.min_tokens and params.grammar is None:
        ends = sorted(params.eos_token_ids | params.stop_token_ids)
        if ends:
            row[torch.tensor(ends, device=row.device)] = float("-inf")


def _draw(row: torch.Tensor, params: SamplingParams, uniform: float) -> int:
    """Inverse transform over the kept tokens, most likely first; the arg-max where the logits are
    no distribution."""
    # The largest becomes 0 first: divided by any temperature, it stays finite.
    scaled = (row - row.max()) / params.temperature
    vocab = row.shape[0]
    if params.top_k is not None and params.top_k < vocab:
        values, ids = scaled.topk(params.top_k)
    elif params.top_p < 1.0:
        values, ids = scaled.sort(descending=True)
    else:
        # Nothing depends on the order.
        values, ids = scaled, None
    probabilities = values.softmax(dim=-1)
    if params.min_p > 0.0:
        probabilities = probabilities.masked_fill_(
            probabilities < params.min_p * probabilities.max(), 0.0
        )
    cumulative = probabilities.double().cumsum(dim=-1)
    total = cumulative[-1]
    if params.top_p < 1.0:
        # The smallest set whose share reaches top_p.
        last = torch.searchsorted(cumulative, params.top_p * total)
        total = cumulative[last.clamp_(max=len(cumulative) - 1)]
    index = int(torch.searchsorted(cumulative, uniform * total, right=True))
    # A total that is no number is below nothing: the search ends behind the last token.
    if index == len(cumulative):
        return int(row.argmax())
    return index if ids is None else int(ids[index])


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[tuple[TokenLogprob, ...]]:
    """Per row of float32 logits [rows, vocab]: the token of ``token_ids`` first, then the
    ``num_top`` most likely ones with their ranks."""
    normalizer = logits.logsumexp(dim=-1)
    ids = torch.tensor(token_ids, device=logits.device)
    own = logits.gather(1, ids[:, None])
    ranks = ((logits > own).sum(dim=-1) + 1).tolist()
    own_logprobs = (own[:, 0] - normalizer).tolist()
    widest = max(num_top, default=0)
    values, tops = logits.topk(min(widest, logits.shape[1]), dim=-1)
    top_logprobs = (values - normalizer[:, None]).tolist()
    top_ids = tops.tolist()
    return [
        (
            TokenLogprob(token_ids[row], own_logprobs[row], ranks[row]),
            *(
                TokenLogprob(top_ids[row][place], top_logprobs[row][place], place + 1)
                for place in range(min(num_top[row], len(top_ids[row])))
            ),
        )
        for row in range(len(token_ids))
    ]
