"""Drives an executor without the engine's core: prompts in, generated ids out.

Sequences advance together under a token budget, prompts in chunks, each with blocks of its own
taken in a scattered order. A sequence can be made to start over in the middle (recompute
preemption): its blocks go back, and prompt plus output are computed again in others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plimsoll_engine.executor import Executor, SampledToken, SequenceChunk, StepBatch
from plimsoll_engine.sampling_params import SamplingParams


@dataclass
class _Sequence:
    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    samples: list[SampledToken] = field(default_factory=list)
    prompt_logprobs: list[object] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.output)

    @property
    def done(self) -> bool:
        return len(self.output) >= self.params.max_tokens


@dataclass(frozen=True)
class Generated:
    token_ids: tuple[int, ...]
    samples: tuple[SampledToken, ...]
    prompt_logprobs: tuple[object, ...]


def generate(
    executor: Executor,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    block_size: int,
    budget: int = 2048,
    preempt_after: Mapping[int, int] | None = None,
    spare_blocks: int = 5,
) -> list[Generated]:
    """``preempt_after``: index of a prompt -> number of its output tokens at which it starts over
    once."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    sequences = [
        _Sequence(f"request-{index}", tuple(prompt), own)
        for index, (prompt, own) in enumerate(zip(prompts, each, strict=True))
    ]
    needed = sum(
        math.ceil((len(sequence.prompt) + sequence.params.max_tokens) / block_size)
        for sequence in sequences
    )
    executor.resize_kv(needed + spare_blocks)
    free = list(range(needed + spare_blocks))
    random.Random(0).shuffle(free)
    preemptions = dict(preempt_after or {})
    while running := [sequence for sequence in sequences if not sequence.done]:
        chunks = _schedule(running, free, block_size, budget)
        for sampled in executor.execute(StepBatch(tuple(chunks))):
            sequence = sequences[int(sampled.request_id.split("-")[1])]
            sequence.prompt_logprobs.extend(sampled.prompt_logprobs)
            if sampled.token_id is not None:
                sequence.output.append(sampled.token_id)
                sequence.samples.append(sampled)
        for index, sequence in enumerate(sequences):
            if sequence.done or preemptions.get(index) == len(sequence.output):
                preemptions.pop(index, None)
                free.extend(reversed(sequence.blocks))
                sequence.blocks.clear()
                sequence.computed = 0
    executor.resize_kv(0)
    return [
        Generated(tuple(sequence.output), tuple(sequence.samples), tuple(sequence.prompt_logprobs))
        for sequence in sequences
    ]


def _schedule(
    running: list[_Sequence], free: list[int], block_size: int, budget: int
) -> list[SequenceChunk]:
    chunks = []
    for sequence in running:
        tokens = sequence.tokens
        take = min(len(tokens) - sequence.computed, budget)
        if take == 0:
            continue
        budget -= take
        start, stop = sequence.computed, sequence.computed + take
        while len(sequence.blocks) * block_size < stop:
            sequence.blocks.append(free.pop())
        wanted = sequence.params.prompt_logprobs
        rows = (0, 0)
        if wanted is not None and not sequence.output:
            rows = (0, min(stop, len(sequence.prompt) - 1) - start)
        chunks.append(
            SequenceChunk(
                request_id=sequence.name,
                token_ids=tokens[start:stop],
                start=start,
                block_ids=tuple(sequence.blocks),
                sampling=sequence.params if stop == len(tokens) else None,
                output_token_ids=tuple(sequence.output),
                prompt_token_ids=sequence.prompt,
                prompt_logprob_rows=rows,
                num_prompt_logprobs=wanted or 0,
            )
        )
        sequence.computed = stop
    return chunks
