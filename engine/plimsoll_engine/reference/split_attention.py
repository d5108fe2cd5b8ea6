"""Joins the attention of parts of a context, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SplitResults:
    """float32 each; scores and maxima are in base 2. A part that saw nothing has the maximum -inf
    and the sum 0, and its partial may hold anything."""

    # [sequences, heads, splits, head_size]: sum of weights x values.
    partials: torch.Tensor
    # [sequences, heads, splits]
    maxima: torch.Tensor
    sums: torch.Tensor


def reduce_splits(results: SplitResults, dtype: torch.dtype) -> torch.Tensor:
    """As ``ops.split_attention.reduce_splits``; 0 where no part saw anything."""
    highest = results.maxima.amax(-1, keepdim=True)
    highest = highest.where(highest > -torch.inf, 0.0)
    factors = torch.exp2(results.maxima - highest)
    partials = results.partials.where(results.maxima[..., None] > -torch.inf, 0.0)
    total = (results.sums * factors).sum(-1, keepdim=True)
    joined = (partials * factors[..., None]).sum(-2)
    return (joined / total.where(total > 0.0, 1.0)).to(dtype)
