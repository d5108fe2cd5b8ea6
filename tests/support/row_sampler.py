"""Choosing a token as it reads in the definition: one row, one number after the other.

What the sampler of batches (plimsoll_engine.sampling) is compared with. In: one row of float32
logits, the request, a number in [0, 1). Out: a token id.
"""

from __future__ import annotations

import random

import torch

from plimsoll_engine.sampling import RowRequest
from plimsoll_engine.sampling_params import SamplingParams


def apply_constraints(row: torch.Tensor, request: RowRequest) -> None:
    """Bias, penalties and forbidden ends, in place on one row [vocab]."""
    params = request.params
    if params.logit_bias:
        ids = torch.tensor([token for token, _ in params.logit_bias], device=row.device)
        row[ids] += torch.tensor([bias for _, bias in params.logit_bias], device=row.device)
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(
            sorted({*request.prompt_token_ids, *request.output_token_ids}), dtype=torch.int64
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


def draw(row: torch.Tensor, params: SamplingParams, uniform: float) -> int:
    """Inverse transform over the kept tokens, most likely first; the arg-max where the logits are
    no distribution."""
    # The largest becomes 0 first: divided by any temperature, it stays finite.
    scaled = (row - row.max()) / params.temperature
    vocab = row.shape[0]
    if params.top_k is not None and params.top_k < vocab:
        values, ids = scaled.topk(params.top_k)
    elif params.top_p < 1.0:
        values, ids = scaled.sort(descending=True, stable=True)
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


def seeded_draw(request: RowRequest) -> float:
    """A number in [0, 1) that depends on the seed and the position alone."""
    return random.Random(f"{request.params.seed}/{len(request.output_token_ids)}").random()
