"""An engine under everything at once, for as long as asked: ``python -m support.soak --minutes 60``.

One process: the real core on its thread over the real model runner with a tiny float32 model. Random
requests from a fixed set of prompts, each compared with what it gives alone; cancellations in every
state; limits that move all the time; allocations that fail. In: a seed and a length. Out: a Report;
``faults`` in it is empty when nothing crashed, leaked or said something else.

Only the device's size is made up: its memory is exact, so that the pool is small enough to be full.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from plimsoll_engine.admission import Refused
from plimsoll_engine.config import DeviceType, EngineConfig
from plimsoll_engine.core import EngineCore
from plimsoll_engine.executor import (
    AllocationFailure,
    DeviceMemory,
    Executor,
    MemoryFigures,
    ModelLimits,
    SampledToken,
    StepBatch,
)
from plimsoll_engine.limits import Limits, LimitsOutcome
from plimsoll_engine.model_runner import ModelRunner
from plimsoll_engine.reports import FinishReason, RequestOutput
from plimsoll_engine.sampling_params import Request, SamplingParams
from support.tiny_model import write_tiny_model

NUM_BLOCKS = 150
MAX_MODEL_LEN = 2000
MAX_NUM_SEQS = 24
MAX_NUM_BATCHED_TOKENS = 256
CLIENTS = 40
# Two tokens this close may change places with the order of a float32 sum: such prompts are not used.
LEAST_LEAD = 1e-4
REFERENCE_SECONDS = 120.0
END_SECONDS = 120.0


class FaultyDevice:
    """An Executor around a real one, on a device of a made-up size that sometimes has no memory.

    A single token is never refused twice in a row: three times would rightly end its request, and
    the engine after three of those.
    """

    def __init__(self, runner: Executor, seed: int) -> None:
        self._runner = runner
        self._random = random.Random(seed)
        self._figures: MemoryFigures | None = None
        self._committed = 0
        self._failures_left = 0
        self._refused_one = False
        self.fault_rate = 0.0
        self.injected = 0

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
        if num_blocks > self._committed and self._random.random() < self.fault_rate:
            self.injected += 1
            raise AllocationFailure("injected: the pool cannot grow", 1)
        self._committed = self._runner.resize_kv(num_blocks)
        return self._committed

    def execute(self, batch: StepBatch) -> list[SampledToken]:
        if not self._failures_left and self._random.random() < self.fault_rate:
            self._failures_left = self._random.randint(1, 3)
        one = batch.num_tokens == 1
        if self._failures_left and not (one and self._refused_one):
            self._failures_left -= 1
            self._refused_one = one
            self.injected += 1
            raise AllocationFailure("injected: no memory for this step", 1)
        self._refused_one = False
        return self._runner.execute(batch)

    def reclaim(self) -> None:
        self._runner.reclaim()

    def memory(self, *, reset_low_water: bool = False) -> DeviceMemory:
        if (figures := self._figures) is None:
            return self._runner.memory(reset_low_water=reset_low_water)
        used = figures.weights + figures.runtime + self._committed * figures.bytes_per_block
        free = max(0, figures.total - used)
        return DeviceMemory(figures.total, free, free)

    def shutdown(self) -> None:
        self._runner.shutdown()


@dataclass
class Report:
    seconds: float = 0.0
    steps: int = 0
    preemptions: int = 0
    injected: int = 0
    caught: int = 0
    limits_moved: int = 0
    # Ends by reason, refusals by reason.
    ended: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    cancelled: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    prefix_cache_hits: int = 0
    rss_start: int = 0
    rss_end: int = 0
    faults: list[str] = field(default_factory=list)

    def fault(self, text: str) -> None:
        # The first ones say it all.
        if len(self.faults) < 20:
            self.faults.append(text)


@dataclass(frozen=True)
class Reference:
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


class Client:
    """One request after another, on the core's thread for outputs and the soak's for all else."""

    def __init__(self) -> None:
        self.request_id = ""
        self.tokens: list[int] = []
        self.final: RequestOutput | None = None
        self.ended = threading.Event()
        self.ended.set()

    def begin(self, request_id: str) -> None:
        self.request_id, self.tokens, self.final = request_id, [], None
        self.ended = threading.Event()

    def __call__(self, output: RequestOutput) -> None:
        self.tokens += output.new_token_ids
        if output.finish_reason is not None:
            self.final = output
            self.ended.set()


def run_soak(folder: Path, *, seconds: float, num_prompts: int = 32, seed: int = 0) -> Report:
    """``folder`` takes the model. Returns when the load has ended and all was looked at."""
    write_tiny_model(folder)
    config = EngineConfig(
        model=str(folder),
        device=DeviceType.CPU,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_num_queued_reqs=32,
        long_prompt_tokens=600,
        long_prompt_share=0.5,
    )
    device = FaultyDevice(ModelRunner(config, "cpu"), seed)
    core = EngineCore(config, device)
    core.start()
    try:
        return _Soak(core, device, seed).run(seconds, num_prompts)
    finally:
        core.stop()


class _Soak:
    def __init__(self, core: EngineCore, device: FaultyDevice, seed: int) -> None:
        self._core = core
        self._device = device
        self._random = random.Random(seed)
        self._report = Report()
        self._clients = [Client() for _ in range(CLIENTS)]
        self._wanted: dict[str, Reference] = {}
        self._number = 0
        self._revision = 0

    def run(self, seconds: float, num_prompts: int) -> Report:
        report, core, chance = self._report, self._core, self._random
        references = self._make_references(num_prompts)
        report.rss_start = psutil.Process().memory_info().rss
        self._device.fault_rate = 0.003
        begun = time.monotonic()
        next_limits = begun
        while (now := time.monotonic()) < begun + seconds and core.failure is None:
            if now >= next_limits:
                self._move_limits()
                next_limits = now + min(chance.uniform(0.5, 5.0), seconds / 8)
            client = chance.choice(self._clients)
            if client.ended.is_set():
                self._check(client)
                self._submit(client, chance.choice(references))
            elif chance.random() < 0.02:
                self._cancel(client)
            # Random, so that cancellations fall into every part of a step.
            time.sleep(chance.uniform(0, 0.002))
        self._finish(references)
        report.seconds = round(time.monotonic() - begun, 1)
        report.rss_end = psutil.Process().memory_info().rss
        return report

    def _make_references(self, num_prompts: int) -> list[Reference]:
        """What each prompt gives alone. Half of them begin alike; some are long."""
        chance = self._random
        references: list[Reference] = []
        shared = [chance.randrange(256) for _ in range(400)]
        while len(references) < num_prompts:
            length = chance.choice([chance.randint(1, 60), chance.randint(60, 600), 1500])
            prompt = [chance.randrange(256) for _ in range(length)]
            if chance.random() < 0.5:
                prompt = shared[: chance.randint(1, 400)] + prompt[: 1 + length // 4]
            client = Client()
            leads: list[float] = []

            def sink(
                output: RequestOutput, client: Client = client, leads: list[float] = leads
            ) -> None:
                for _, first, second in output.logprobs:
                    leads.append(first.logprob - second.logprob)
                client(output)

            client.begin(self._next_id())
            num_tokens = chance.randint(1, 60)
            params = SamplingParams(num_tokens, temperature=0.0, ignore_eos=True, logprobs=2)
            # A salt of its own: computed whole, with nothing found in the cache.
            self._core.submit(
                Request(
                    client.request_id, tuple(prompt), params, time.time(), 0, client.request_id
                ),
                sink,
            )
            assert client.ended.wait(REFERENCE_SECONDS), "the engine does not answer alone"
            if min(leads) > LEAST_LEAD:
                references.append(Reference(tuple(prompt), tuple(client.tokens)))
        return references

    def _submit(self, client: Client, reference: Reference) -> bool:
        chance = self._random
        client.begin(self._next_id())
        self._wanted[client.request_id] = reference
        params = SamplingParams(
            len(reference.tokens),
            temperature=0.0,
            ignore_eos=True,
            logprobs=chance.choice([None, None, 3]),
            prompt_logprobs=1 if chance.random() < 0.05 else None,
        )
        try:
            self._core.submit(
                Request(
                    client.request_id,
                    reference.prompt,
                    params,
                    time.time(),
                    chance.choice([0, 0, 0, 1]),
                ),
                client,
            )
        except Refused as refused:
            self._report.refused[refused.reason.value] += 1
            if refused.status != 429:
                self._report.fault(f"refused for good: {refused.message}")
            del self._wanted[client.request_id]
            client.ended.set()
            return False
        # Some leave before anything has happened at all.
        if chance.random() < 0.02:
            self._cancel(client)
        return True

    def _cancel(self, client: Client) -> None:
        self._report.cancelled["begun" if client.tokens else "not begun"] += 1
        self._core.abort(client.request_id)

    def _check(self, client: Client) -> None:
        """What came, after the end: all of it, or its beginning when it was cancelled."""
        wanted = self._wanted.pop(client.request_id, None)
        if wanted is None or client.final is None:
            return
        reason = client.final.finish_reason
        assert reason is not None
        self._report.ended[reason.value] += 1
        complete = reason is FinishReason.LENGTH
        expected = wanted.tokens if complete else wanted.tokens[: len(client.tokens)]
        if tuple(client.tokens) != expected:
            self._report.fault(
                f"{client.request_id} ({len(wanted.prompt)} prompt tokens, {reason}) said "
                f"{client.tokens}, alone {list(wanted.tokens)}"
            )
        self._report.compared += complete
        if reason is FinishReason.ERROR:
            self._report.fault(f"{client.request_id}: {client.final.error}")

    def _move_limits(self) -> None:
        chance = self._random
        self._revision += 1
        tokens = chance.randint(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)
        result = self._core.set_limits(
            self._revision,
            Limits(
                max_model_len=chance.randint(64, MAX_MODEL_LEN),
                gpu_memory_utilization=chance.uniform(0.5, 0.95),
                max_num_seqs=chance.randint(1, MAX_NUM_SEQS),
                max_num_batched_tokens=tokens,
                watermark=chance.choice([0.0, 0.02, 0.1]),
                long_prompt_tokens=chance.randint(100, 1000),
                long_prompt_share=chance.uniform(0.1, 1.0),
            ),
        )
        self._report.limits_moved += result.outcome is not LimitsOutcome.REJECTED

    def _next_id(self) -> str:
        self._number += 1
        return f"r{self._number}"

    def _finish(self, references: list[Reference]) -> None:
        report, core = self._report, self._core
        deadline = time.monotonic() + END_SECONDS
        for client in self._clients:
            if not client.ended.wait(max(0.0, deadline - time.monotonic())):
                report.fault(f"{client.request_id} never ended")
            self._check(client)
        if core.failure is not None:
            report.fault(f"the engine has died: {core.failure.message}")
            return
        # Whatever it went through, it still says what it said.
        self._device.fault_rate = 0.0
        self._revision += 1
        core.set_limits(
            self._revision,
            Limits(
                max_model_len=MAX_MODEL_LEN,
                gpu_memory_utilization=0.9,
                max_num_seqs=MAX_NUM_SEQS,
                max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            ),
        )
        for client, reference in zip(self._clients, references, strict=False):
            if self._submit(client, reference):
                client.ended.wait(END_SECONDS)
                self._check(client)
        core.drain(END_SECONDS)
        end = core.snapshot()
        if end.running or end.waiting or end.used_blocks or end.kv_slots_unused:
            report.fault(
                f"left behind: {end.running} running, {end.waiting} waiting, "
                f"{end.used_blocks} used blocks"
            )
        report.steps, report.preemptions = end.steps, end.preemptions
        report.injected, report.caught = self._device.injected, end.allocation_failures_caught
        report.prefix_cache_hits = end.prefix_cache_hits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    # A line for each refused allocation would fill the disk.
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        report = run_soak(Path(folder), seconds=60 * given.minutes, seed=given.seed)
    print(json.dumps(vars(report), indent=2))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
