"""What the engine's core asks of whatever computes: one batch in, sampled tokens out.

In: a :class:`StepBatch` of plain integers (token ids, positions, block ids) and sampling
parameters. Out: one :class:`SampledToken` per chunk that asked for one. This module knows neither
torch nor the scheduler; the torch executors live in ``runner`` and ``parallel``, a scripted one in
``tests/support``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from plimsoll_engine.sampling_params import SamplingParams


class AllocationFailure(Exception):
    """The device could not give memory inside a step. The step changed no request's state.

    Attributes:
        requested_bytes: size of the failed allocation, when the device told it.
    """

    def __init__(self, message: str, requested_bytes: int | None = None) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes


@dataclass(frozen=True)
class SequenceChunk:
    """One request's share of a step: ``token_ids`` at positions [start, start + len(token_ids)).

    ``block_ids`` covers every position below ``start + len(token_ids)``: the block of position p
    is ``block_ids[p // block_size]``.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    # Set when this chunk reaches the request's last known token: sample its successor.
    sampling: SamplingParams | None
    # Tokens generated so far (penalties, seeded sampling, min_tokens), and the prompt's ids when
    # a repetition penalty or prompt log-probabilities need them.
    output_token_ids: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    # Rows of this chunk whose log-probability of the *next prompt token* is wanted: half-open
    # range of offsets into token_ids; empty when none.
    prompt_logprob_rows: tuple[int, int] = (0, 0)
    # Most likely tokens wanted beside each of those rows' own (SamplingParams.prompt_logprobs;
    # ``sampling`` is None in all chunks but a request's last).
    num_prompt_logprobs: int = 0
    # A bit for each token that may be sampled, in the order of their ids, where the grammar is kept to
    # in another process than the one that samples; None: any token.
    allowed_tokens: bytes | None = None


@dataclass(frozen=True)
class StepBatch:
    chunks: tuple[SequenceChunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True)
class TokenLogprob:
    token_id: int
    logprob: float
    # 1 is the most likely token.
    rank: int


@dataclass(frozen=True)
class SampledToken:
    """``token_id`` is None for a chunk that only wanted prompt log-probabilities."""

    request_id: str
    token_id: int | None
    # The chosen token's entry first, then the top ``logprobs`` entries; empty when not asked.
    logprobs: tuple[TokenLogprob, ...] = ()
    # One tuple like ``logprobs`` per row of ``prompt_logprob_rows``.
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    # Why this request, and it alone, cannot go on; ``token_id`` means nothing then.
    error: str | None = None


@dataclass(frozen=True)
class ModelLimits:
    """Facts of the loaded model that admission and validation need."""

    # Rows of the output embedding without padding rows: the range of valid token ids.
    vocab_size: int
    # max_position_embeddings with rope scaling taken into account.
    max_model_len: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the worst rank. ``total`` is the smallest of device, cgroup and configured limit."""

    total: int
    free: int
    # Smallest ``free`` since the previous call with ``reset_low_water=True``.
    free_low_water: int


@dataclass(frozen=True)
class MemoryFigures:
    """Measured by ``profile()`` on the worst rank, in bytes; the input of the memory plan."""

    total: int
    weights: int
    # Peak above the resting level in the worst admissible step.
    activations: int
    # Interpreter, libraries, collective buffers: resting use that is neither weights nor KV.
    runtime: int
    bytes_per_block: int
    # Recorded decode steps, as they were allocated; 0 where nothing is recorded.
    graphs: int = 0


class Executor(Protocol):
    """Driven by one thread, the core's. Every method may raise ``termination.EngineFailure``."""

    def load(self) -> ModelLimits:
        """Reads the weights onto the device(s)."""

    def profile(
        self, *, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
    ) -> MemoryFigures:
        """Runs the worst admissible step (last chunk at full context, widest sampled batch), then
        records the decode steps that are replayed later, where the device can."""

    def resize_kv(self, num_blocks: int) -> int:
        """Grows or shrinks the committed KV pool by whole segments.

        Shrinking gives up the highest block ids; the caller has freed them. Returns the blocks now
        committed (at least ``num_blocks``).
        Raises AllocationFailure when growth is refused; the pool is then unchanged.
        """

    def execute(self, batch: StepBatch) -> list[SampledToken]:
        """Writes K/V of every chunk's tokens, attends, samples. Raises AllocationFailure."""

    def reclaim(self) -> None:
        """Returns cached device memory to the device (after an AllocationFailure)."""

    def memory(self, *, reset_low_water: bool = False) -> DeviceMemory: ...

    def shutdown(self) -> None: ...
