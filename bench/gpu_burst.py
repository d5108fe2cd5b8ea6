"""A burst of long prompts on a device of which a ballast leaves little, with a neighbour that takes some.

In: a Scale, and whether the engine's line is pinned at 0.98 or tuned. Out: what was answered, what ran
out, what was left. The ballast is a process of its own. The tuner is the operator's: it reads the
engine's page every few seconds and moves its limits, from 0.90 within 0.80 and 0.94, as in the cluster.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
from gpu_engine import Finished, build_request, engine_config
from gpu_scale import Scale

from plimsoll_engine.admission import Refused
from plimsoll_engine.core import EngineCore
from plimsoll_engine.limits import Limits
from plimsoll_engine.metrics import EngineMetrics
from plimsoll_engine.model_runner import ModelRunner
from plimsoll_operator.metrics_page import read_page
from plimsoll_operator.spec import TuningMode
from plimsoll_operator.tuning import decide
from plimsoll_operator.tuning.values import Learned, Settings, TuningInputs, TuningState
from plimsoll_operator.tuning.values import Limits as TunedLimits

PINNED, START = 0.98, 0.90
_PIECE = 256 << 20


def hold_ballast(kind: str, free: int, more: int) -> None:
    """The ballast's process: leaves ``free`` bytes, takes ``more`` at the first line that it reads,
    and holds them until its input ends. Says what it has done, in bytes."""
    held: list[torch.Tensor] = []
    if kind == "cuda":
        while (spare := torch.cuda.mem_get_info()[0] - free) > 0:
            held.append(torch.empty(min(spare, _PIECE), dtype=torch.uint8, device=kind))
    print(sum(piece.nbytes for piece in held), flush=True)
    if sys.stdin.readline():
        taken = _take(kind, more)
        print(sum(piece.nbytes for piece in taken), flush=True)
        sys.stdin.read()


def _take(kind: str, size: int) -> list[torch.Tensor]:
    pieces: list[torch.Tensor] = []
    for start in range(0, size, _PIECE):
        try:
            pieces.append(torch.zeros(min(_PIECE, size - start), dtype=torch.uint8, device=kind))
        except torch.OutOfMemoryError:
            break
    return pieces


class Ballast:
    def __init__(self, scale: Scale) -> None:
        """Returns when the memory is held."""
        burst = scale.burst
        self._process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("gpu.py")),
                *("--ballast", scale.kind, str(burst.free), str(burst.neighbour)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.held = self._answer()

    def take_more(self) -> int:
        """Bytes that the neighbour got."""
        assert self._process.stdin is not None
        self._process.stdin.write("more\n")
        self._process.stdin.flush()
        return self._answer()

    def release(self) -> None:
        self._process.communicate(timeout=30)

    def _answer(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the ballast has died with status {self._process.wait()}")
        return int(line)


class Tuner:
    """The operator's decisions on this engine, on a thread; limits are set as SetLimits does it."""

    def __init__(self, scale: Scale, core: EngineCore, metrics: EngineMetrics) -> None:
        self._core = core
        self._metrics = metrics
        self._settings = Settings(
            mode=TuningMode.AUTO,
            start=TunedLimits(gpu_memory_utilization=START),
            min_utilization=0.80,
            max_utilization=0.94,
            tunes_length=True,
            floor=scale.burst.floor,
            ceiling=scale.burst.max_model_len,
            block_size=16,
            on_cpu=scale.kind == "cpu",
            memory_limit=None,
            time_to_first_token=2.0,
            scrape_interval=scale.burst.scrape,
            generation=1,
            max_num_seqs=core.snapshot().limits.max_num_seqs,
            max_num_batched_tokens=scale.max_num_batched_tokens,
        )
        self._state, self._learned = TuningState(), Learned()
        self.changes: list[str] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._ended.wait(self._settings.scrape_interval):
            self._decide(time.time())

    def _decide(self, now: float) -> None:
        page = self._metrics.page().decode()
        decision = decide(
            TuningInputs(
                settings=self._settings,
                engines={"engine": read_page(page, pod="engine", model=None, at=now)},
                failures=(),
                state=self._state,
                learned=self._learned,
                now=now,
            )
        )
        self._state, self._learned = decision.state, decision.learned
        self.changes += [
            f"{change.parameter} {change.before} -> {change.after}: {change.reason}"
            for change in decision.changes
        ]
        if decision.revision > self._core.snapshot().limits_revision:
            self._core.set_limits(decision.revision, Limits(**asdict(decision.limits)))


def measure_burst(scale: Scale, tuned: bool) -> dict[str, Any]:
    ballast = Ballast(scale)
    try:
        with _engine(scale, START if tuned else PINNED) as (core, metrics):
            neighbour = ballast.take_more()
            if not tuned:
                return {"held": ballast.held, "neighbour": neighbour, **_burst(scale, core)}
            with Tuner(scale, core, metrics) as tuner:
                figures = _burst(scale, core)
            return {
                "held": ballast.held,
                "neighbour": neighbour,
                **figures,
                "changes": tuner.changes,
            }
    finally:
        ballast.release()


@contextmanager
def _engine(scale: Scale, utilization: float) -> Iterator[tuple[EngineCore, EngineMetrics]]:
    memory = scale.device_memory
    if scale.kind == "cuda":
        # What the ballast and the contexts of both processes leave.
        memory = torch.cuda.mem_get_info()[0]
    with tempfile.TemporaryDirectory() as folder:
        config = engine_config(
            scale,
            scale.burst.shape,
            Path(folder),
            device_memory=memory,
            gpu_memory_utilization=utilization,
            max_model_len=scale.burst.max_model_len,
        )
        metrics = EngineMetrics("burst")
        core = EngineCore(config, ModelRunner(config, scale.kind), observer=metrics)
        try:
            core.start()
            metrics.expose(core.snapshot)
            yield core, metrics
        finally:
            core.stop()


def _burst(scale: Scale, core: EngineCore) -> dict[str, Any]:
    burst = scale.burst
    sinks: list[Finished] = []
    refused, lowest, start = 0, core.snapshot().device.free, time.monotonic()
    end = start + burst.seconds
    for index in range(burst.requests):
        due = start + index * burst.seconds / 2 / burst.requests
        lowest = min(lowest, _watch(core, due))
        prompt = tuple((index + place) % 1000 for place in range(burst.prompt))
        sink = Finished()
        try:
            core.submit(build_request(str(index), prompt, burst.output), sink)
        except Refused:
            refused += 1
        else:
            sinks.append(sink)
    while time.monotonic() < end and core.failure is None and not all(s.ended for s in sinks):
        lowest = min(lowest, _watch(core, time.monotonic() + 0.1))
    last = core.snapshot()
    return {
        "failure": None if core.failure is None else str(core.failure),
        "allocation_failures_caught": last.allocation_failures_caught,
        "answered": sum(sink.tokens == burst.output for sink in sinks),
        "lost": sum(bool(sink.errors) for sink in sinks),
        "refused": refused,
        "unfinished": sum(not sink.ended for sink in sinks),
        "seconds": time.monotonic() - start,
        "lowest_free_bytes": lowest,
        "preemptions": last.preemptions,
    }


def _watch(core: EngineCore, until: float) -> int:
    """Sleeps; the least free memory that was seen."""
    lowest = core.snapshot().device.free_low_water
    while (left := until - time.monotonic()) > 0 and core.failure is None:
        time.sleep(min(left, 0.1))
        lowest = min(lowest, core.snapshot().device.free_low_water)
    return lowest
