"""Runs of policies over seeds, in processes, with results kept by content.

In: cells. Out: a summary for each, from the cache where inputs and code are the same. A run that is
interrupted goes on where it was: each finished cell is a file.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from plimsoll_simulator.hardware import LLAMA_3_1_8B, SHAPES, Model
from plimsoll_simulator.memory_model import DeviceMemory, draw_surprises
from plimsoll_simulator.metrics import summarize
from plimsoll_simulator.policies import build_policy, startable
from plimsoll_simulator.records import RunRecord
from plimsoll_simulator.replica import Replica
from plimsoll_simulator.simulation import Fleet
from plimsoll_simulator.step_time import seconds_per_prompt_token, step_time_of
from plimsoll_simulator.timeline import draw_timeline
from plimsoll_simulator.traces import Trace, read_trace
from plimsoll_simulator.workload import Workload, build_workload

# All that a result depends on beside its inputs.
_CODE = {
    "plimsoll_simulator": ("*.py", "data/*.csv"),
    "plimsoll_engine": (
        "admission.py",
        "blocks.py",
        "prefix_cache.py",
        "scheduler.py",
        "sequence.py",
        "waiting.py",
    ),
    "plimsoll_operator": ("tuning/*.py",),
}
# What only shows results.
_DISPLAY = {
    "__main__.py",
    "app.py",
    "comparison.py",
    "gates.py",
    "oracle.py",
    "plots.py",
    "report.py",
    "results.py",
}


@dataclass(frozen=True)
class Cell:
    """One run: what is asked of which hardware under which policy. ``factor`` scales fragmentation
    and surprises; ``seconds`` None: as long as the injection wants."""

    trace: Path
    keep: float
    injection: str
    rate: float | None
    seconds: float | None
    hardware: str
    replicas: int
    factor: float
    policy: str
    seed: int
    model: Model = LLAMA_3_1_8B


@dataclass(frozen=True)
class Result:
    """``starts``: False where the policy's own length does not fit, and the longest that does was
    taken in its place. ``summary`` and ``timeline`` as JSON has them."""

    cell: Cell
    starts: bool
    setting: str
    summary: dict[str, Any]
    timeline: dict[str, Any]


def run(cell: Cell) -> tuple[RunRecord, bool, str]:
    """The record, whether the policy starts as it is, and its setting in words."""
    hardware, model = SHAPES[cell.hardware], cell.model
    policy = build_policy(cell.policy, hardware, model, seed=cell.seed, factor=cell.factor)
    policy, starts = startable(policy, hardware, model)
    workload = workload_of(cell)
    replicas = [
        Replica(
            f"replica-{number}",
            hardware,
            model,
            step_time_of(hardware, model),
            _memory(cell, number, workload),
            policy.settings,
        )
        for number in range(cell.replicas)
    ]
    fleet = Fleet(workload, replicas, policy.controller())
    with _no_collection():
        return fleet.run(), starts, policy.description


@contextmanager
def _no_collection() -> Iterator[None]:
    """A run makes no cycles, and to look for some takes a tenth of its time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def workload_of(cell: Cell) -> Workload:
    return build_workload(
        _trace(cell.trace),
        keep=cell.keep,
        injection=cell.injection,
        seed=cell.seed,
        rate=cell.rate,
        seconds=cell.seconds,
    )


def _memory(cell: Cell, number: int, workload: Workload) -> DeviceMemory:
    name = f"{cell.seed} replica-{number}"
    return DeviceMemory(
        SHAPES[cell.hardware],
        cell.model,
        seed=name,
        factor=cell.factor,
        surprises=draw_surprises(name, workload.span),
        cotenant=workload.cotenant,
        leak=workload.leak,
    )


@cache
def _trace(path: Path) -> Trace:
    return read_trace(path)


def evaluate(
    cells: Sequence[Cell],
    *,
    cache_dir: Path,
    processes: int,
    progress: Callable[[Result, bool], None],
) -> list[Result]:
    """In the order of ``cells``. ``progress`` is told each result, and whether it was cached."""
    results: dict[Cell, Result] = {}
    missing = []
    for cell in cells:
        found = _load(_path(cache_dir, cell), cell)
        if found is None:
            missing.append(cell)
        else:
            results[cell] = found
            progress(found, True)
    with ProcessPoolExecutor(processes) as pool:
        futures = {pool.submit(_run_and_keep, cell, cache_dir): cell for cell in missing}
        try:
            for future in as_completed(futures):
                result = future.result()
                results[futures[future]] = result
                progress(result, False)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [results[cell] for cell in cells]


def default_cache_dir() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "plimsoll" / "simulator"


def _run_and_keep(cell: Cell, cache_dir: Path) -> Result:
    record, starts, setting = run(cell)
    per_token = seconds_per_prompt_token(step_time_of(SHAPES[cell.hardware], cell.model))
    summary, timeline = summarize(record, per_token), draw_timeline(record)
    kept = {
        "starts": starts,
        "setting": setting,
        "summary": asdict(summary),
        "timeline": asdict(timeline),
    }
    path = _path(cache_dir, cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(kept), encoding="utf-8")
    partial.replace(path)
    found = _load(path, cell)
    assert found is not None
    return found


def _load(path: Path, cell: Cell) -> Result | None:
    """A file that cannot be read is made again."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return Result(cell, kept["starts"], kept["setting"], kept["summary"], kept["timeline"])
    except (OSError, ValueError, KeyError):
        return None


def _path(cache_dir: Path, cell: Cell) -> Path:
    inputs = {**asdict(cell), "trace": _digest_of(cell.trace)}
    key = json.dumps([inputs, code_digest()], sort_keys=True)
    return cache_dir / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


@cache
def _digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@cache
def code_digest() -> str:
    digest = hashlib.sha256()
    for package, patterns in _CODE.items():
        root = Path(str(files(package)))
        found = sorted(path for pattern in patterns for path in root.glob(pattern))
        for path in found:
            if path.name not in _DISPLAY:
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
