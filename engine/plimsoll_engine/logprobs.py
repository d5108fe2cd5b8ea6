"""Log-probabilities of tokens, and of the most likely ones beside them.

In: float32 logits, as the model gave them, and one token per row. Out: a table that is computed where
the logits are, and read by the host once it has waited for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from plimsoll_engine.executor import TokenLogprob
from plimsoll_engine.transfers import to_host


@dataclass(frozen=True)
class LogprobTable:
    # [rows]: each row's token, its log-probability and its rank (1 is the most likely).
    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    # [rows, widest]: the most likely first.
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def to_host(self) -> LogprobTable:
        """See transfers.to_host."""
        return LogprobTable(
            to_host(self.token_ids),
            to_host(self.logprobs),
            to_host(self.ranks),
            to_host(self.top_ids),
            to_host(self.top_logprobs),
        )

    def entries(self, num_top: Sequence[int]) -> list[tuple[TokenLogprob, ...]]:
        """Per row its token first, then as many of the most likely ones as ``num_top`` says."""
        own = zip(self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), strict=True)
        tops = zip(self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True)
        return [
            (
                TokenLogprob(*token),
                *(
                    TokenLogprob(top_id, logprob, place + 1)
                    for place, (top_id, logprob) in enumerate(zip(*top, strict=True))
                    if place < wanted
                ),
            )
            for token, top, wanted in zip(own, tops, num_top, strict=True)
        ]


def build_logprob_table(logits: torch.Tensor, token_ids: torch.Tensor, widest: int) -> LogprobTable:
    """logits [rows, vocab]; token_ids int64 [rows]; ``widest``: the most that any row wants of the
    most likely ones."""
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    own = logits.gather(1, token_ids[:, None])
    values, tops = logits.topk(min(widest, logits.shape[1]), dim=-1)
    return LogprobTable(
        token_ids,
        (own - normalizer)[:, 0],
        (logits > own).sum(dim=-1) + 1,
        tops,
        values - normalizer,
    )
