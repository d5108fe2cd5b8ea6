"""Turns a step's logits into sampled tokens and log-probabilities.

In: the rows that are wanted of a step and their logits, pass by pass. Out: one SampledToken per
request that asked for something. What a pass computes stays on the device until the end: the host
waits once a step, for a few numbers per row. This module knows neither the model nor who may run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from plimsoll_engine.executor import SampledToken, SequenceChunk, StepBatch, TokenLogprob
from plimsoll_engine.grammar import GrammarMatchers, forbid_others
from plimsoll_engine.logprobs import LogprobTable, build_logprob_table
from plimsoll_engine.sampling import RowRequest, Sampler
from plimsoll_engine.step_inputs import WantedRow
from plimsoll_engine.transfers import Mark, indices, to_host


@dataclass(frozen=True)
class _Told:
    """Log-probabilities on their way to the host, and whose they are."""

    request_ids: Sequence[str]
    # Of the most likely tokens, by row.
    num_top: Sequence[int]
    table: LogprobTable

    def entries(self) -> Iterator[tuple[str, tuple[TokenLogprob, ...]]]:
        return zip(self.request_ids, self.table.entries(self.num_top), strict=True)


class StepResults:
    """Of one step."""

    def __init__(self, sampler: Sampler, matchers: GrammarMatchers) -> None:
        self._sampler = sampler
        self._matchers = matchers
        self._sampled: list[tuple[Sequence[str], torch.Tensor]] = []
        self._told: list[_Told] = []
        self._told_of_prompts: list[_Told] = []
        self._errors: dict[str, str] = {}

    def add(self, rows: Sequence[WantedRow], logits: torch.Tensor) -> None:
        """One pass: logits [rows, vocab], float32, may be changed."""
        scored = [place for place, wanted in enumerate(rows) if wanted.next_token is not None]
        sampled = [place for place, wanted in enumerate(rows) if wanted.next_token is None]
        if scored:
            self._score([rows[place] for place in scored], _select(logits, scored))
        if sampled:
            self._sample([rows[place].chunk for place in sampled], _select(logits, sampled))

    def read(self, batch: StepBatch, device: torch.device) -> list[SampledToken]:
        """Waits for ``device``. In the batch's order."""
        Mark(device).wait()
        tokens = {
            request_id: token
            for request_ids, chosen in self._sampled
            for request_id, token in zip(request_ids, chosen.tolist(), strict=True)
        }
        logprobs = {name: entry for told in self._told for name, entry in told.entries()}
        prompts: dict[str, list[tuple[TokenLogprob, ...]]] = {}
        for told in self._told_of_prompts:
            for name, entry in told.entries():
                prompts.setdefault(name, []).append(entry)
        return [
            SampledToken(
                request_id=chunk.request_id,
                token_id=tokens.get(chunk.request_id),
                logprobs=logprobs.get(chunk.request_id, ()),
                prompt_logprobs=tuple(prompts.get(chunk.request_id, ())),
                error=self._errors.get(chunk.request_id),
            )
            for chunk in batch.chunks
            if chunk.request_id in tokens or chunk.request_id in prompts
        ]

    def _score(self, rows: Sequence[WantedRow], logits: torch.Tensor) -> None:
        following = indices([row.next_token or 0 for row in rows], logits.device)
        num_top = [row.chunk.num_prompt_logprobs for row in rows]
        table = build_logprob_table(logits, following, max(num_top))
        names = [row.chunk.request_id for row in rows]
        self._told_of_prompts.append(_Told(names, num_top, table.to_host()))

    def _sample(self, chunks: Sequence[SequenceChunk], logits: torch.Tensor) -> None:
        requests = [_row_request(chunk) for chunk in chunks]
        names = [chunk.request_id for chunk in chunks]
        wanted = [request.params.logprobs for request in requests]
        telling = [place for place, num_top in enumerate(wanted) if num_top is not None]
        telling_rows = indices(telling, logits.device)
        # Log-probabilities are those of the model, before bias and penalties change the rows.
        untouched = logits[telling_rows]
        allowed = self._matchers.find_allowed(chunks, logits.shape[1])
        self._errors |= allowed.errors
        forbid_others(
            logits,
            [allowed.tokens.get(chunk.request_id, chunk.allowed_tokens) for chunk in chunks],
        )
        chosen = self._sampler.choose(logits, requests)
        self._sampled.append((names, to_host(chosen)))
        if telling:
            num_top = [wanted[place] or 0 for place in telling]
            table = build_logprob_table(untouched, chosen[telling_rows], max(num_top))
            self._told.append(_Told([names[place] for place in telling], num_top, table.to_host()))


def _select(logits: torch.Tensor, places: list[int]) -> torch.Tensor:
    """The rows ``places``; without a copy when that is all of them."""
    return logits if len(places) == len(logits) else logits[indices(places, logits.device)]


def _row_request(chunk: SequenceChunk) -> RowRequest:
    assert chunk.sampling is not None
    return RowRequest(chunk.sampling, chunk.output_token_ids, chunk.prompt_token_ids)
