"""The real engine process on a device of a made-up size that sometimes has no memory.

``python -m support.faulty_engine --faults FILE [--leak] ENGINE_FLAGS``: while FILE exists, allocations
fail at random, in steps and when the pool grows. After every eighth step the whole bookkeeping is
checked; a lost or doubled block ends the engine as any bug does. ``--leak`` is such a bug.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
from collections.abc import Iterable
from pathlib import Path

from plimsoll_engine.blocks import BlockPool
from plimsoll_engine.config import EngineConfig, parse_args
from plimsoll_engine.engine_loop import EngineLoop
from plimsoll_engine.executor import (
    AllocationFailure,
    DeviceMemory,
    Executor,
    MemoryFigures,
    ModelLimits,
    SampledToken,
    StepBatch,
)
from plimsoll_engine.process import run_engine
from plimsoll_engine.runner import build_executor, device_kind
from plimsoll_engine.scheduler import ScheduledStep

NUM_BLOCKS = 150
FAULT_RATE = 0.003
CHECK_EVERY = 8


class FaultyDevice:
    """An Executor around a real one. A single token is never refused twice in a row: three times
    would rightly end its request, and the engine after three of those."""

    def __init__(self, runner: Executor, faults: Path, seed: int) -> None:
        self._runner = runner
        self._faults = faults
        self._random = random.Random(seed)
        self._figures: MemoryFigures | None = None
        self._committed = 0
        self._failures_left = 0
        self._refused_one = False

    def load(self) -> ModelLimits:
        return self._runner.load()

    def profile(
        self, *, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
    ) -> MemoryFigures:
        real = self._runner.profile(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        pool = NUM_BLOCKS * real.bytes_per_block
        # Without the interpreter, beside which so small a model and its pool would be nothing.
        total = int((real.weights + real.activations + pool) / 0.9) + 1
        self._figures = MemoryFigures(
            total, real.weights, real.activations, 0, real.bytes_per_block
        )
        return self._figures

    def resize_kv(self, num_blocks: int) -> int:
        if num_blocks > self._committed > 0 and self._fails():
            raise AllocationFailure("injected: the pool cannot grow", 1)
        self._committed = self._runner.resize_kv(num_blocks)
        return self._committed

    def execute(self, batch: StepBatch) -> list[SampledToken]:
        if not self._failures_left and self._fails():
            self._failures_left = self._random.randint(1, 3)
        one = batch.num_tokens == 1
        if self._failures_left and not (one and self._refused_one):
            self._failures_left -= 1
            self._refused_one = one
            raise AllocationFailure("injected: no memory for this step", 1)
        self._refused_one = False
        return self._runner.execute(batch)

    def reclaim(self) -> None:
        self._runner.reclaim()

    def memory(self, *, reset_low_water: bool = False) -> DeviceMemory:
        if (figures := self._figures) is None:
            return self._runner.memory(reset_low_water=reset_low_water)
        used = figures.weights + self._committed * figures.bytes_per_block
        free = max(0, figures.total - used)
        return DeviceMemory(figures.total, free, free)

    def shutdown(self) -> None:
        self._runner.shutdown()

    def _fails(self) -> bool:
        return self._random.random() < FAULT_RATE and self._faults.exists()


class CheckedLoop(EngineLoop):
    """An EngineLoop that looks after itself."""

    _turns = 0

    def execute(self, step: ScheduledStep) -> None:
        super().execute(step)
        self._turns += 1
        if self._turns % CHECK_EVERY == 0:
            self.check()


class LeakyPool(BlockPool):
    """Forgets to give back the last block of every tenth request."""

    _releases = 0

    def release(self, ids: Iterable[int]) -> None:
        ids = tuple(ids)
        self._releases += 1
        super().release(ids[:-1] if self._releases % 10 == 0 else ids)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=Path, required=True)
    parser.add_argument("--leak", action="store_true")
    parser.add_argument("--fault-seed", type=int, default=0)
    given, flags = parser.parse_known_args()
    # A line for each refused allocation would fill the disk.
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)

    def build(config: EngineConfig) -> Executor:
        device_kind(config.device)
        return FaultyDevice(build_executor(config), given.faults, given.fault_seed)

    from plimsoll_engine import core, engine_loop

    vars(core)["EngineLoop"] = CheckedLoop
    if given.leak:
        vars(engine_loop)["BlockPool"] = LeakyPool
    return run_engine(parse_args(flags, os.environ), build_executor=build)


if __name__ == "__main__":
    os._exit(main())
