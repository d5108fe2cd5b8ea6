"""One request inside the engine: its tokens, how many are computed, and its blocks.

Also the two rules that need nothing else: the chunk of a step that an executor gets, and when a
request has ended. This module knows neither the queue nor the pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from plimsoll_engine.executor import SequenceChunk
from plimsoll_engine.prefix_cache import PrefixHashes
from plimsoll_engine.reports import FinishReason
from plimsoll_engine.sampling_params import Request, SamplingParams


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """``tokens`` are the prompt and what was generated so far; those below ``computed`` have
    their keys and values in ``blocks``."""

    request: Request
    # Smaller goes first, in the queue and among the running: (priority, number of arrival).
    order: tuple[int, int]
    # Names the content of its blocks; None where nobody would look for it.
    prefix: PrefixHashes | None = None
    # The request's, read so often that a look through it would show.
    request_id: str = field(init=False)
    tokens: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    state: SequenceState = SequenceState.WAITING
    computed: int = 0
    blocks: tuple[int, ...] = ()
    # Most tokens ever computed: below it, after a preemption, everything is recomputation.
    high_water: int = 0
    preemptions: int = 0
    # Of ``blocks``, how many have been told to the pool with their content.
    named_blocks: int = 0
    # Tokens of the prompt that were found computed when it was first admitted.
    cached_tokens: int = 0
    # Blocks of those that entered before it though they came later.
    overtaken_by: int = 0

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        self.tokens = list(self.request.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def remaining(self) -> int:
        """Known tokens that are not computed: 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def max_total_tokens(self) -> int:
        return self.num_prompt_tokens + self.params.max_tokens


@dataclass(frozen=True)
class Stop:
    reason: FinishReason
    # The id out of stop_token_ids that did it.
    token_id: int | None = None


def find_stop(sequence: Sequence) -> Stop | None:
    """Whether the tokens known now end the request; looked at after each new token."""
    params = sequence.params
    produced = sequence.num_output_tokens
    if produced and produced >= params.min_tokens:
        last = sequence.tokens[-1]
        if last in params.eos_token_ids and not params.ignore_eos:
            return Stop(FinishReason.STOP)
        if last in params.stop_token_ids:
            return Stop(FinishReason.STOP, last)
    if produced >= params.max_tokens and sequence.high_water >= sequence.num_prompt_tokens:
        return Stop(FinishReason.LENGTH)
    return None


def build_chunk(sequence: Sequence, start: int, count: int) -> SequenceChunk:
    """The executor's view of ``sequence`` in a step that computes [start, start + count)."""
    params = sequence.params
    end = start + count
    samples = end == len(sequence.tokens) and params.max_tokens > 0
    rows = (0, 0)
    if params.prompt_logprobs is not None:
        # Position p tells the log-probability of the prompt's token p + 1. What was computed
        # before a preemption has been delivered already.
        first = max(start, sequence.high_water)
        last = min(end, sequence.num_prompt_tokens - 1)
        rows = (first - start, last - start) if first < last else rows
    return SequenceChunk(
        request_id=sequence.request_id,
        token_ids=tuple(sequence.tokens[start:end]),
        start=start,
        block_ids=sequence.blocks,
        sampling=params if samples else None,
        output_token_ids=(
            tuple(sequence.tokens[sequence.num_prompt_tokens :])
            if samples and _needs_outputs(params)
            else ()
        ),
        prompt_token_ids=(
            sequence.request.prompt_token_ids
            if params.repetition_penalty != 1.0 or rows != (0, 0)
            else ()
        ),
        prompt_logprob_rows=rows,
        num_prompt_logprobs=params.prompt_logprobs or 0,
    )


def _needs_outputs(params: SamplingParams) -> bool:
    return (
        params.min_tokens > 0
        or params.grammar is not None
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.repetition_penalty != 1.0
        # The draw depends on the request's seed and the number of the token.
        or params.seed is not None
    )
