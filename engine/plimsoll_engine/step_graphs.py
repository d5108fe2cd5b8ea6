"""Decode steps that are recorded once and replayed: launching their kernels one by one would take the
host longer than they take the device.

In: a forward pass that reads tensors alone, a device's recorder, and then batches of sequences that
compute one token each. Out: their hidden states. A graph is recorded for each of a few sizes; a
batch takes the smallest that holds it, and the rows left over belong to nobody: their slot is below
zero, so nothing is stored, and their context is empty, so nothing is read. All graphs share their
inputs: tensors that stay where they are, with block tables as wide as the longest sequence. Keys and
values are found through the cache's table of segments, which is updated in place: the pool may grow
and shrink between replays. This module knows neither the model nor CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from plimsoll_engine.attention_batch import AttentionBatch
from plimsoll_engine.device import Recorder
from plimsoll_engine.executor import SequenceChunk, StepBatch
from plimsoll_engine.step_inputs import StepInputs
from plimsoll_engine.transfers import to_device

# vLLM's: beyond it a step is long enough for its launches.
LARGEST_BY_DEFAULT = 512
_SMALLEST = (1, 2, 4, 8)
_STEP = 16
# A row of nobody.
NO_SLOT = -1

Forward = Callable[[StepInputs], torch.Tensor]


def default_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then multiples of 16; ``largest`` itself always."""
    sizes = {*_SMALLEST, *range(_STEP, largest + 1, _STEP), largest}
    return tuple(sorted(size for size in sizes if size <= largest))


class StepGraphs:
    def __init__(
        self, sizes: Sequence[int], table_width: int, block_size: int, device: torch.device
    ) -> None:
        """``table_width`` is in blocks."""
        self._sizes = tuple(sorted(sizes))
        self._width = table_width
        self._block_size = block_size
        self._device = device
        largest = self._sizes[-1]
        on_cuda = device.type == "cuda"

        def host(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=on_cuda)

        # Token ids, positions and slots; then context lengths: what changes with every step.
        self._host_tokens = host(3, largest, dtype=torch.int64)
        self._host_lens = host(largest, dtype=torch.int32)
        self._host_tokens[2] = NO_SLOT
        self._tokens = self._host_tokens.to(device, copy=True)
        self._lens = self._host_lens.to(device, copy=True)
        self._starts = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._tables = torch.zeros((largest, table_width), dtype=torch.int32, device=device)
        # What the rows of ``_tables`` hold, and whose they are.
        self._held: list[tuple[int, ...]] = [()] * largest
        self._owners: list[str | None] = [None] * largest
        self._hidden: torch.Tensor | None = None
        self._replays: dict[int, Callable[[], None]] = {}

    def capture(self, recorder: Recorder, forward: Forward) -> None:
        """The largest first: the smaller ones find its memory free to use again.

        Raises whatever the device's allocator raises.
        """
        for size in reversed(self._sizes):
            inputs = self._inputs(size)
            hidden = self._hidden_rows(size, forward, inputs)

            def work(inputs: StepInputs = inputs, hidden: torch.Tensor = hidden) -> None:
                hidden.copy_(forward(inputs))

            self._replays[size] = recorder.record(work)

    def takes(self, batch: StepBatch) -> bool:
        """Whether ``run`` can; decided by the batch alone, so that all ranks decide alike."""
        return len(batch.chunks) <= self._sizes[-1] and all(
            len(chunk.token_ids) == 1
            and chunk.prompt_logprob_rows == (0, 0)
            and len(chunk.block_ids) <= self._width
            for chunk in batch.chunks
        )

    def run(self, batch: StepBatch) -> tuple[StepBatch, torch.Tensor]:
        """The batch in the order of its rows, and the hidden states of those, which stay as they are
        until the next ``run``."""
        count = len(batch.chunks)
        size = next(size for size in self._sizes if size >= count)
        chunks = self._arrange(batch.chunks)
        self._send_tables(chunks)
        self._send_tokens(chunks)
        self._replays[size]()
        assert self._hidden is not None, "capture() comes first"
        return StepBatch(tuple(chunks)), self._hidden[:count]

    def _inputs(self, size: int) -> StepInputs:
        tokens = self._tokens
        return StepInputs(
            token_ids=tokens[0, :size],
            positions=tokens[1, :size],
            slots=tokens[2, :size],
            attention=AttentionBatch(
                query_lens=(1,) * size,
                # Not known to the host when a graph is recorded: the tensor alone says it.
                context_lens=(0,) * size,
                block_tables=self._tables[:size],
                query_starts=self._starts[: size + 1],
                context_lens_tensor=self._lens[:size],
            ),
        )

    def _hidden_rows(self, size: int, forward: Forward, inputs: StepInputs) -> torch.Tensor:
        if self._hidden is None:
            self._hidden = torch.empty_like(forward(inputs))
        return self._hidden[:size]

    def _arrange(self, chunks: Sequence[SequenceChunk]) -> list[SequenceChunk]:
        """Everybody keeps the row of the step before where it is among the first, so that few block
        tables change when somebody leaves."""
        count = len(chunks)
        by_id = {chunk.request_id: chunk for chunk in chunks}
        rows: list[SequenceChunk | None] = [
            None if owner is None else by_id.pop(owner, None) for owner in self._owners[:count]
        ]
        moved = iter(by_id.values())
        arranged = [next(moved) if chunk is None else chunk for chunk in rows]
        self._owners[:count] = [chunk.request_id for chunk in arranged]
        return arranged

    def _send_tables(self, chunks: Sequence[SequenceChunk]) -> None:
        """Only the cells that are not there yet."""
        fresh: dict[int, tuple[int, ...]] = {}
        cells: list[np.ndarray] = []
        values: list[int] = []
        for row, chunk in enumerate(chunks):
            held, ids = self._held[row], chunk.block_ids
            if ids is held:
                continue
            known = len(held) if ids[: len(held)] == held else 0
            start = row * self._width
            cells.append(np.arange(start + known, start + len(ids), dtype=np.int64))
            values.extend(ids[known:])
            fresh[row] = ids
        if values:
            where = to_device(np.concatenate(cells), self._device)
            what = to_device(np.asarray(values, dtype=np.int32), self._device)
            self._tables.view(-1).index_copy_(0, where, what)
        for row, ids in fresh.items():
            self._held[row] = ids

    def _send_tokens(self, chunks: Sequence[SequenceChunk]) -> None:
        count, size = len(chunks), self._block_size
        tokens, lens = self._host_tokens.numpy(), self._host_lens.numpy()
        starts = [chunk.start for chunk in chunks]
        tokens[0, :count] = [chunk.token_ids[0] for chunk in chunks]
        tokens[1, :count] = starts
        tokens[2, :count] = [
            chunk.block_ids[start // size] * size + start % size
            for chunk, start in zip(chunks, starts, strict=True)
        ]
        tokens[:2, count:] = 0
        tokens[2, count:] = NO_SLOT
        lens[:count] = tokens[1, :count] + 1
        lens[count:] = 0
        # The step before has been waited for: nobody reads the host's side any more.
        self._tokens.copy_(self._host_tokens, non_blocking=True)
        self._lens.copy_(self._host_lens, non_blocking=True)
