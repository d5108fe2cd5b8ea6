"""SmolLM2 under scheduler, small pool and several ranks: the same tokens as transformers.

A pool so small that requests are preempted, and a batch over three ranks.
"""

from __future__ import annotations

import queue
from dataclasses import replace
from pathlib import Path

import pytest

from plimsoll_engine.config import DeviceType, EngineConfig
from plimsoll_engine.core import EngineCore
from plimsoll_engine.executor import (
    DeviceMemory,
    Executor,
    MemoryFigures,
    ModelLimits,
    SampledToken,
    StepBatch,
)
from plimsoll_engine.model_runner import ModelRunner
from plimsoll_engine.reports import RequestOutput
from plimsoll_engine.runner import build_executor
from plimsoll_engine.sampling_params import Request
from support.greedy_loop import generate
from support.smollm2_greedy import GREEDY, expected, prompts, snapshot

__all__ = ["expected", "prompts", "snapshot"]

pytestmark = pytest.mark.model


class SmallPool(Executor):
    """A loaded runner whose device is just large enough for a pool of ``num_blocks``."""

    def __init__(self, runner: ModelRunner, limits: ModelLimits, num_blocks: int) -> None:
        self._runner = runner
        self._limits = limits
        self._num_blocks = num_blocks

    def load(self) -> ModelLimits:
        return self._limits

    def profile(
        self, *, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
    ) -> MemoryFigures:
        figures = self._runner.profile(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        pool = self._num_blocks * figures.bytes_per_block
        needed = figures.weights + figures.activations + figures.runtime + pool
        return replace(figures, total=needed)

    def resize_kv(self, num_blocks: int) -> int:
        return self._runner.resize_kv(num_blocks)

    def execute(self, batch: StepBatch) -> list[SampledToken]:
        return self._runner.execute(batch)

    def reclaim(self) -> None:
        self._runner.reclaim()

    def memory(self, *, reset_low_water: bool = False) -> DeviceMemory:
        return self._runner.memory(reset_low_water=reset_low_water)

    def shutdown(self) -> None:
        self._runner.shutdown()


def test_after_forced_preemptions(
    snapshot: Path, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    """Through scheduler and block pool: requests lose their blocks and compute again."""
    config = EngineConfig(
        model=str(snapshot),
        device=DeviceType.CPU,
        device_memory=4 << 30,
        gpu_memory_utilization=1.0,
        max_model_len=128,
        max_num_seqs=32,
        max_num_batched_tokens=256,
        # Several prompts begin alike, and would share the blocks that are to run out.
        enable_prefix_caching=False,
    )
    runner = ModelRunner(config, "cpu")
    executor = SmallPool(runner, runner.load(), num_blocks=24)
    core = EngineCore(config, executor)
    core.start()
    outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
    try:
        for index, prompt in enumerate(prompts):
            core.submit(Request(str(index), tuple(prompt), GREEDY, arrival_time=0.0), outputs.put)
        tokens: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
        left = set(tokens)
        while left:
            output = outputs.get(timeout=300)
            tokens[output.request_id].extend(output.new_token_ids)
            if output.finish_reason is not None:
                left.remove(output.request_id)
        preemptions = core.snapshot().preemptions
    finally:
        core.stop()
    assert [tuple(tokens[str(index)]) for index in range(len(prompts))] == expected
    assert preemptions > 0


def test_three_ranks_give_the_same_tokens(
    snapshot: Path, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    config = EngineConfig(
        model=str(snapshot),
        device=DeviceType.CPU,
        device_memory=8 << 30,
        tensor_parallel_size=3,
    )
    executor = build_executor(config)
    try:
        executor.load()
        results = generate(executor, prompts, GREEDY, block_size=16)
    finally:
        executor.shutdown()
    assert [result.token_ids for result in results] == expected
