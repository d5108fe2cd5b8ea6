"""What the simulator must reproduce before any of its results counts: real measurements.

In: nothing but the data of this package. Out: a tuple of :class:`Gate`, each with what was measured,
what was simulated and whether that is near enough. Nothing in here is fitted to pass.

G1 and G2 replay a recorded run of vLLM 0.19.0 on an RTX 4090 (data/NOTICE). G3 is the measurement
in vLLM's pull request 44594 (preemptions by watermark), G4 what vLLM's RFC 54644 and inference-sim's
issue 963 say of recomputation.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

import numpy as np

from plimsoll_simulator.hardware import A100_80, BLOCK_SIZE, LLAMA_3_1_8B, RTX_4090, Hardware
from plimsoll_simulator.memory_model import DeviceMemory
from plimsoll_simulator.records import RequestRecord
from plimsoll_simulator.replica import Counters, EngineSettings, Replica
from plimsoll_simulator.step_time import step_time_of
from plimsoll_simulator.workload import SimulatedRequest


@dataclass(frozen=True)
class Gate:
    """``measured`` and ``simulated`` are to be shown; ``allowed`` says in words when it holds."""

    name: str
    figure: str
    measured: str
    simulated: str
    allowed: str
    holds: bool


@dataclass(frozen=True)
class Replay:
    """One run of a single engine, seconds and tokens. ``ttft`` and ``tpot`` by request."""

    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    latency: tuple[float, ...]
    makespan: float
    waiting_most: int
    preemptions: tuple[int, ...]
    counters: Counters

    @property
    def recompute_tax(self) -> float:
        return self.counters.recomputed_tokens / self.counters.computed_tokens

    @property
    def generated_per_second(self) -> float:
        return self.counters.generation_tokens / self.makespan


@dataclass(frozen=True)
class _Measured:
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    latency: tuple[float, ...]
    makespan: float


# The same run's time series: the most that waited. (The other figures are computed from its
# requests.)
_WAITING_MOST = 234
_BLOCKS = 2588
# LLMServingSim without activation memory has so many blocks, and says so of its TTFT.
_BLOCKS_NO_ACT = 3400
_TTFT_ERROR_NO_ACT = -0.207

# Pull request 44594: preemptions by watermark, of 450 requests. (At 0.15 it has 168 as well.)
PREEMPTIONS = {0.0: 1065, 0.02: 400, 0.05: 187, 0.10: 168}
_WATERMARKS_JUDGED = (0.0, 0.02, 0.05)
_WATERMARK_TOKENS = 299_584

# The sizes of RFC 54644, which tells of 79 %, 58 %, 32 % and of no preemption in the last.
_TAX_BLOCKS = (400, 800, 1600, 2800)


@dataclass(frozen=True)
class Replays:
    """The runs that the gates judge. ``watermark``: preemptions by watermark, one for each seed."""

    recorded: Replay
    larger: Replay
    watermark: Mapping[float, Sequence[int]]
    taxes: Sequence[float]


def replay_all(
    seeds: int, processes: int, progress: Callable[[int, int], None] = lambda done, of: None
) -> Replays:
    """``seeds`` workloads are drawn for G3, whose lengths are known by mean and spread alone.
    ``progress`` is told how many runs are done, of how many."""
    with ProcessPoolExecutor(processes) as pool:
        watermark = {
            mark: [pool.submit(preemptions_at, mark, seed) for seed in range(seeds)]
            for mark in PREEMPTIONS
        }
        recorded = [pool.submit(replay_recorded, blocks) for blocks in (_BLOCKS, _BLOCKS_NO_ACT)]
        taxes = [pool.submit(recompute_tax_at, blocks) for blocks in _TAX_BLOCKS]
        everything: list[Future[Any]] = [
            *(f for runs in watermark.values() for f in runs),
            *recorded,
            *taxes,
        ]
        for done, _ in enumerate(as_completed(everything), 1):
            progress(done, len(everything))
        return Replays(
            recorded=recorded[0].result(),
            larger=recorded[1].result(),
            watermark={mark: [f.result() for f in runs] for mark, runs in watermark.items()},
            taxes=[future.result() for future in taxes],
        )


def judge(replays: Replays) -> tuple[Gate, ...]:
    return (
        *check_replay(replays.recorded),
        check_larger_pool(replays.larger),
        *check_watermark({mark: _mean(runs) for mark, runs in replays.watermark.items()}),
        *check_recomputation(replays.taxes, replays.recorded),
    )


def check_replay(replay: Replay) -> tuple[Gate, ...]:
    real = _recorded()[1]

    def gate(figure: str, measured: float, simulated: float, unit: str, scale: float = 1) -> Gate:
        error = simulated / measured - 1
        return Gate(
            "G1",
            figure,
            f"{measured * scale:.1f} {unit}",
            f"{simulated * scale:.1f} {unit}, {error:+.1%}",
            "within 5 %",
            abs(error) <= 0.05,
        )

    return (
        gate("time to first token, mean", _mean(real.ttft), _mean(replay.ttft), "s"),
        gate("time to first token, p99", _p99(real.ttft), _p99(replay.ttft), "s"),
        gate("time per output token, mean", _mean(real.tpot), _mean(replay.tpot), "ms", 1e3),
        gate("time per output token, p99", _p99(real.tpot), _p99(replay.tpot), "ms", 1e3),
        gate("latency, mean", _mean(real.latency), _mean(replay.latency), "s"),
        gate("makespan", real.makespan, replay.makespan, "s"),
        gate("waiting, most", _WAITING_MOST, replay.waiting_most, "requests"),
    )


def check_larger_pool(replay: Replay) -> Gate:
    error = _mean(replay.ttft) / _mean(_recorded()[1].ttft) - 1
    return Gate(
        "G2",
        f"error of the mean time to first token, with {_BLOCKS_NO_ACT} blocks",
        f"{_TTFT_ERROR_NO_ACT:+.1%}",
        f"{error:+.1%}",
        "within 3 points",
        abs(error - _TTFT_ERROR_NO_ACT) <= 0.03,
    )


def check_watermark(found: Mapping[float, float]) -> tuple[Gate, ...]:
    """``found``: preemptions by watermark."""

    def gate(mark: float) -> Gate:
        error = found[mark] / PREEMPTIONS[mark] - 1
        return Gate(
            "G3",
            f"preemptions, watermark {mark:g}",
            str(PREEMPTIONS[mark]),
            f"{found[mark]:.0f}, {error:+.0%}",
            "within 20 %",
            abs(error) <= 0.20,
        )

    counts = list(found.values())
    ratio = found[0.05] / found[0.0]
    return (
        *(gate(mark) for mark in _WATERMARKS_JUDGED),
        Gate(
            "G3",
            "preemptions, watermarks " + ", ".join(f"{mark:g}" for mark in PREEMPTIONS),
            ", ".join(str(count) for count in PREEMPTIONS.values()),
            ", ".join(f"{count:.0f}" for count in counts),
            "fewer at a larger one",
            all(more > less for more, less in pairwise(counts)),
        ),
        Gate(
            "G3",
            "preemptions, watermark 0.05 of off",
            f"{PREEMPTIONS[0.05] / PREEMPTIONS[0.0]:.2f}",
            f"{ratio:.2f}",
            "0.12 to 0.25",
            0.12 <= ratio <= 0.25,
        ),
    )


def check_recomputation(taxes: Sequence[float], recorded: Replay) -> tuple[Gate, ...]:
    counts = [count for count in recorded.preemptions if count]
    share = sum(count <= 4 for count in counts) / max(1, len(counts))
    return (
        Gate(
            "G4",
            f"recomputed of computed tokens, {', '.join(map(str, _TAX_BLOCKS))} blocks",
            "79%, 58%, 32%, 0%",
            ", ".join(f"{tax:.0%}" for tax in taxes),
            "less in a larger cache",
            all(more > less for more, less in pairwise(taxes)),
        ),
        Gate(
            "G4",
            f"of {len(counts)} preempted requests of G1, preempted 4 times at most",
            "all",
            f"{share:.1%}",
            "95 % and more",
            share >= 0.95,
        ),
    )


@cache
def replay_recorded(blocks: int) -> Replay:
    """The recorded requests on so many blocks, of which vLLM keeps one back as its null block. The
    recorded engine shared prefixes: a preempted request finds what is left of its own."""
    return replay(RTX_4090, _recorded()[0], blocks - 1, prefix_caching=True)


def preemptions_at(watermark: float, seed: int) -> int:
    """450 requests, about 1000 tokens in and 5000 out with 20 % spread, 128 at a time."""
    chance = random.Random(f"watermark {seed}")
    requests = [
        SimulatedRequest(n, 0.0, chance.randint(800, 1200), chance.randint(4000, 6000))
        for n in range(450)
    ]
    blocks = _WATERMARK_TOKENS // BLOCK_SIZE
    return replay(A100_80, requests, blocks, watermark, concurrency=128).counters.preemptions


def recompute_tax_at(blocks: int) -> float:
    """300 requests of 560 tokens in the mean, which fit 2800 blocks when 64 of them run; the mean
    of five draws."""
    taxes = []
    for seed in range(5):
        chance = random.Random(f"recompute {seed}")
        requests = [
            SimulatedRequest(n, 0.0, chance.randint(128, 384), chance.randint(152, 456))
            for n in range(300)
        ]
        taxes.append(replay(RTX_4090, requests, blocks, concurrency=64).recompute_tax)
    return _mean(taxes)


@cache
def _recorded() -> tuple[tuple[SimulatedRequest, ...], _Measured]:
    source = files("plimsoll_simulator") / "data" / "rtx4090_llama-3.1-8b_requests.jsonl"
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    rows.sort(key=lambda row: row["queued_ts"])
    start = rows[0]["queued_ts"]
    requests = tuple(
        SimulatedRequest(n, row["queued_ts"] - start, row["input_toks"], row["output_toks"])
        for n, row in enumerate(rows)
    )
    measured = _Measured(
        ttft=tuple(row["first_token_ts"] - row["queued_ts"] for row in rows),
        tpot=tuple(
            (row["last_token_ts"] - row["first_token_ts"]) / (row["output_toks"] - 1)
            for row in rows
        ),
        latency=tuple(row["last_token_ts"] - row["queued_ts"] for row in rows),
        makespan=max(row["last_token_ts"] for row in rows) - start,
    )
    return requests, measured


def replay(
    hardware: Hardware,
    requests: Sequence[SimulatedRequest],
    blocks: int,
    watermark: float = 0.0,
    *,
    concurrency: int | None = None,
    prefix_caching: bool = False,
) -> Replay:
    """One engine with a given cache and no limit of memory; with ``concurrency``, a request is sent
    when one before it has ended, whatever its time."""
    settings = EngineSettings(
        0.9,
        fits_length=True,
        watermark=watermark,
        num_gpu_blocks_override=blocks,
        prefix_caching=prefix_caching,
    )
    memory = DeviceMemory(hardware, LLAMA_3_1_8B, seed="", factor=0.0)
    step_time = step_time_of(hardware, LLAMA_3_1_8B)
    replica = Replica("replay", hardware, LLAMA_3_1_8B, step_time, memory, settings)
    records = [RequestRecord(request) for request in requests]
    pending, now, waiting_most = deque(records), 0.0, 0
    while pending or replica.live:
        while pending and _is_due(pending[0], now, replica, concurrency):
            replica.add(pending.popleft(), now)
        step = replica.begin_step(now)
        waiting_most = max(waiting_most, replica.scheduler.num_waiting)
        if step is None:
            now = pending[0].request.time
            continue
        now += step.duration
        replica.end_step(now)
    return Replay(
        ttft=tuple(r.time_to_first_token or 0.0 for r in records),
        tpot=tuple(r.time_per_output_token or 0.0 for r in records),
        latency=tuple((r.finished or 0.0) - r.request.time for r in records),
        makespan=now,
        waiting_most=waiting_most,
        preemptions=tuple(r.preemptions for r in records),
        counters=replica.counters,
    )


def _is_due(record: RequestRecord, now: float, replica: Replica, concurrency: int | None) -> bool:
    if concurrency is not None:
        return replica.outstanding < concurrency
    return record.request.time <= now


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99))
