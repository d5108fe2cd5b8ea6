"""An Executor without a model: it says what its script says, and checks every block table.

What K/V depend on is remembered in their place, as the torch executors remember K/V themselves: the
position, the token, and all tokens before. So a step that reads a position which was never written
there, or was overwritten by other content, fails the test.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from plimsoll_engine.executor import (
    AllocationFailure,
    DeviceMemory,
    MemoryFigures,
    ModelLimits,
    SampledToken,
    SequenceChunk,
    StepBatch,
    TokenLogprob,
)

MIB = 1 << 20

# Output token at an output position (from 0) of a request.
Script = Callable[[str, int], int]

TINY_MODEL = ModelLimits(
    vocab_size=1000,
    max_model_len=8192,
    num_layers=2,
    num_attention_heads=4,
    num_kv_heads=2,
    head_size=64,
    dtype="float32",
)


def figures(
    num_blocks: int,
    *,
    utilization: float = 0.9,
    bytes_per_block: int = MIB,
    weights: int = 100 * MIB,
    activations: int = 20 * MIB,
    runtime: int = 30 * MIB,
) -> MemoryFigures:
    """Figures of a device on which exactly ``num_blocks`` fit at ``utilization``."""
    used = weights + activations + runtime + num_blocks * bytes_per_block
    total = -int(-used // utilization)
    return MemoryFigures(total, weights, activations, runtime, bytes_per_block)


def count_up(request_id: str, position: int) -> int:
    return position + 3


class ScriptedExecutor:
    """``before_step`` sees every batch first: it may block, or raise an AllocationFailure.

    ``bytes_elsewhere`` is memory that a neighbour holds; it may be changed at any time. A growth
    of the pool beyond what is left is refused, as a device would.
    """

    def __init__(
        self,
        script: Script = count_up,
        *,
        memory_figures: MemoryFigures | None = None,
        limits: ModelLimits = TINY_MODEL,
        block_size: int = 16,
        segment_blocks: int = 1,
        before_step: Callable[[StepBatch], None] | None = None,
    ) -> None:
        self.script = script
        self.figures = memory_figures or figures(64)
        self.limits = limits
        self.block_size = block_size
        self.segment_blocks = segment_blocks
        self.before_step = before_step
        self.bytes_elsewhere = 0
        self.committed = 0
        self.batches: list[StepBatch] = []
        self.reclaimed = 0
        self.running = True
        self.profiled: dict[str, int] = {}
        # What is known of the tokens of a request, by position; a test may enter a prompt here.
        self.tokens: defaultdict[str, dict[int, int]] = defaultdict(dict)
        # (block id, offset) -> (position, hash of the tokens up to there)
        self._slots: dict[tuple[int, int], tuple[int, int]] = {}
        # Total tokens known when a request's first output token was sampled.
        self._first_output: dict[str, int] = {}
        self._low_water: int | None = None

    def load(self) -> ModelLimits:
        return self.limits

    def profile(
        self, *, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
    ) -> MemoryFigures:
        self.profiled = {
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": max_num_seqs,
            "max_model_len": max_model_len,
        }
        return self.figures

    def resize_kv(self, num_blocks: int) -> int:
        segments = -(-num_blocks // self.segment_blocks)
        committed = segments * self.segment_blocks
        growth = (committed - self.committed) * self.figures.bytes_per_block
        if growth > 0 and growth > self.memory().free:
            raise AllocationFailure(f"no room for {growth} bytes of KV cache", growth)
        self.committed = committed
        self._slots = {at: held for at, held in self._slots.items() if at[0] < committed}
        return committed

    def execute(self, batch: StepBatch) -> list[SampledToken]:
        if self.before_step is not None:
            self.before_step(batch)
        self.batches.append(batch)
        for chunk in batch.chunks:
            self._write(chunk)
        for chunk in batch.chunks:
            self._read(chunk)
        return [
            self._sample(chunk)
            for chunk in batch.chunks
            if chunk.sampling is not None or chunk.prompt_logprob_rows != (0, 0)
        ]

    def reclaim(self) -> None:
        self.reclaimed += 1

    def memory(self, *, reset_low_water: bool = False) -> DeviceMemory:
        f = self.figures
        used = f.weights + f.runtime + self.committed * f.bytes_per_block + self.bytes_elsewhere
        free = max(0, f.total - used)
        low = free if self._low_water is None else min(free, self._low_water)
        self._low_water = None if reset_low_water else low
        return DeviceMemory(f.total, free, low)

    def shutdown(self) -> None:
        self.running = False

    def _write(self, chunk: SequenceChunk) -> None:
        assert chunk.token_ids, "an empty chunk"
        assert len(set(chunk.block_ids)) == len(chunk.block_ids), "a block twice in one table"
        assert all(0 <= block < self.committed for block in chunk.block_ids), (
            f"a block beyond the committed {self.committed}: {chunk.block_ids}"
        )
        for position, token in enumerate(chunk.token_ids, start=chunk.start):
            self.tokens[chunk.request_id][position] = token
            content = hash((self._content(chunk, position - 1), token))
            self._slots[self._slot(chunk, position)] = (position, content)

    def _read(self, chunk: SequenceChunk) -> None:
        for position in range(chunk.start + len(chunk.token_ids)):
            content = self._content(chunk, position)
            token = self.tokens[chunk.request_id].get(position)
            # A cached start of a prompt that the test did not enter is not known here.
            if token is not None:
                assert content == hash((self._content(chunk, position - 1), token)), (
                    f"{chunk.request_id} reads position {position} and finds other tokens"
                )

    def _content(self, chunk: SequenceChunk, position: int) -> int:
        if position < 0:
            return 0
        held = self._slots.get(self._slot(chunk, position))
        assert held is not None, f"{chunk.request_id} reads position {position}, never written"
        assert held[0] == position, f"{chunk.request_id} reads {position} and finds {held[0]}"
        return held[1]

    def _slot(self, chunk: SequenceChunk, position: int) -> tuple[int, int]:
        return chunk.block_ids[position // self.block_size], position % self.block_size

    def _sample(self, chunk: SequenceChunk) -> SampledToken:
        known = chunk.start + len(chunk.token_ids)
        token = None
        logprobs: tuple[TokenLogprob, ...] = ()
        if chunk.sampling is not None:
            first = self._first_output.setdefault(chunk.request_id, known)
            token = self.script(chunk.request_id, known - first)
            if chunk.sampling.logprobs is not None:
                logprobs = _ranked(token, chunk.sampling.logprobs)
        first_row, end_row = chunk.prompt_logprob_rows
        prompt_logprobs = tuple(
            _ranked(chunk.prompt_token_ids[chunk.start + row + 1], chunk.num_prompt_logprobs)
            for row in range(first_row, end_row)
        )
        return SampledToken(chunk.request_id, token, logprobs, prompt_logprobs)


def _ranked(token: int, count: int) -> tuple[TokenLogprob, ...]:
    """The token as the most likely one, then ``count`` entries of which it is the first."""
    others = [
        TokenLogprob((token + rank) % 1000, -1.0 - rank, rank + 1) for rank in range(1, count)
    ]
    own = TokenLogprob(token, -0.5, 1)
    return (own, *([own, *others] if count else []))
