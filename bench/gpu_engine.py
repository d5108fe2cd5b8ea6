"""The engine in this process, from scheduler to sampler: throughput, its own share of a step, live
resizing.

In: a Scale and what the device was measured to do. Out: figures. Weights are drawn at random on the
device (``--load-format dummy``); there is no tokenizer and no server, prompts are token ids.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_scale import GIB, Scale, Shape, Workload

from plimsoll_engine.config import DeviceType, DType, EngineConfig, LoadFormat
from plimsoll_engine.engine_loop import EngineLoop
from plimsoll_engine.limits import Limits, LimitsOutcome
from plimsoll_engine.model_runner import ModelRunner
from plimsoll_engine.models.config import DTYPES
from plimsoll_engine.reports import RequestOutput
from plimsoll_engine.sampling_params import Request, SamplingParams

# nano-vllm's.
_TEMPERATURE = 0.6


def engine_config(scale: Scale, shape: Shape, folder: Path, **settings: Any) -> EngineConfig:
    shape.save(folder)
    config = EngineConfig(
        model=str(folder),
        load_format=LoadFormat.DUMMY,
        device=DeviceType(scale.kind),
        dtype=DType(scale.dtype),
        device_memory=scale.device_memory,
        max_model_len=scale.max_model_len,
        max_num_batched_tokens=scale.max_num_batched_tokens,
        max_num_seqs=min(256, scale.max_num_batched_tokens),
    )
    return replace(config, **settings)


@contextmanager
def opened(scale: Scale, shape: Shape, **settings: Any) -> Iterator[tuple[EngineLoop, ModelRunner]]:
    with tempfile.TemporaryDirectory() as folder:
        config = engine_config(scale, shape, Path(folder), **settings)
        runner = ModelRunner(config, scale.kind)
        try:
            yield EngineLoop(config, runner, None, time.time), runner
        finally:
            runner.shutdown()


def build_request(name: str, prompt: tuple[int, ...], output: int) -> Request:
    params = SamplingParams(max_tokens=output, temperature=_TEMPERATURE, ignore_eos=True)
    return Request(name, prompt, params, time.time())


class Finished:
    """Counts what requests got; a sink."""

    def __init__(self) -> None:
        self.tokens = 0
        self.errors: list[str] = []
        self.ended = False

    def __call__(self, output: RequestOutput) -> None:
        self.tokens += len(output.new_token_ids)
        if output.error:
            self.errors.append(output.error)
        self.ended = self.ended or output.finish_reason is not None


def measure_throughput(
    scale: Scale, shape: Shape, copy_bandwidth: float, matmul_flops: float
) -> dict[str, Any]:
    """Output tokens a second of the workload, and the share of the roofline."""
    workload, finished = scale.workload, Finished()
    with opened(scale, shape) as (loop, _):
        # Kernels for prompts are compiled with the first.
        loop.add(build_request("warm-up", workload.prompts[0], 2), Finished())
        _run(loop)
        for row, (prompt, output) in enumerate(
            zip(workload.prompts, workload.outputs, strict=True)
        ):
            loop.add(build_request(str(row), prompt, output), finished)
        start, before = time.perf_counter(), loop.snapshot()
        _run(loop)
        seconds, after = time.perf_counter() - start, loop.snapshot()
    if finished.errors or finished.tokens != workload.output_tokens:
        raise RuntimeError(f"{finished.tokens} tokens, errors: {finished.errors[:3]}")
    bound = roofline_seconds(
        shape, workload, DTYPES[scale.dtype].itemsize, copy_bandwidth, matmul_flops
    )
    return {
        "model": shape.name,
        "seconds": seconds,
        "output_tokens_per_second": finished.tokens / seconds,
        "roofline_tokens_per_second": finished.tokens / bound,
        "share_of_roofline": bound / seconds,
        "steps": after.steps - before.steps,
        "preemptions": after.preemptions - before.preemptions,
        "memory": {each.name: each.planned_bytes for each in after.classes},
    }


def roofline_seconds(
    shape: Shape, workload: Workload, itemsize: int, bandwidth: float, flops: float
) -> float:
    """All requests start together: weights are read once for every token of the longest output, each
    token reads the keys and values before it, prompts are as fast as matrix products."""
    weights = max(workload.outputs) * shape.parameters * itemsize
    attended = sum(
        output * len(prompt) + output * (output - 1) // 2
        for prompt, output in zip(workload.prompts, workload.outputs, strict=True)
    )
    reading = (weights + attended * shape.kv_bytes(itemsize)) / bandwidth
    return reading + 2 * shape.parameters * workload.input_tokens / flops


def measure_overhead(scale: Scale) -> list[dict[str, Any]]:
    """Microseconds of a decode step of a model of nearly nothing: scheduling, inputs, launches,
    sampling, processing. With recorded steps and without."""
    return [
        {"enforce_eager": eager, **row}
        for eager in (False, True)
        for row in _overhead(scale, eager)
    ]


def _overhead(scale: Scale, eager: bool) -> Iterator[dict[str, Any]]:
    with opened(scale, scale.tiny, enforce_eager=eager) as (loop, _):
        for batch in scale.overhead_batches:
            for row in range(batch):
                loop.add(build_request(f"{batch}-{row}", (1, 2, 3), 1000), Finished())
            # Prompts, and the first decode steps of this size.
            for _ in range(3):
                loop.step()
            scheduling, executing = [], []
            for _ in range(scale.overhead_steps):
                begun = time.perf_counter()
                step = loop.schedule()
                scheduled = time.perf_counter()
                loop.execute(step)
                executing.append(time.perf_counter() - scheduled)
                scheduling.append(scheduled - begun)
            loop.abort_all()
            yield {
                "batch": batch,
                "schedule_us": 1e6 * statistics.median(scheduling),
                "execute_us": 1e6 * statistics.median(executing),
            }


def measure_resizing(scale: Scale) -> dict[str, Any]:
    """Seconds for a GiB by which the pool shrinks and grows while a request runs, and the share of it
    that the device has back in between."""
    with opened(scale, scale.resized) as (loop, runner):
        loop.add(build_request("running", (1, 2, 3), 100), Finished())
        loop.step()
        before, line = loop.snapshot(), loop.snapshot().limits.gpu_memory_utilization
        assert line is not None
        free = runner.memory().free
        lower = line - scale.resized_bytes / before.device.total
        shrinking = _move(loop, 1, lower)
        moved = before.bytes_per_block * (
            before.committed_blocks - loop.snapshot().committed_blocks
        )
        if moved == 0:
            raise RuntimeError(f"the pool of {before.committed_blocks} blocks gave up none")
        given_back = runner.memory().free - free
        loop.step()
        growing = _move(loop, 2, line)
        loop.step()
        if loop.snapshot().committed_blocks < before.committed_blocks:
            raise RuntimeError("the pool did not grow back")
    return {
        "bytes": moved,
        "shrink_seconds_per_gib": shrinking * GIB / moved,
        "grow_seconds_per_gib": growing * GIB / moved,
        "given_back_share": given_back / moved,
    }


def _move(loop: EngineLoop, revision: int, utilization: float) -> float:
    start = time.perf_counter()
    result = loop.move_limits(revision, Limits(gpu_memory_utilization=utilization))
    seconds = time.perf_counter() - start
    if result.outcome is not LimitsOutcome.APPLIED:
        raise RuntimeError(f"utilization {utilization}: {result.outcome}, {result.reason}")
    return seconds


def _run(loop: EngineLoop) -> None:
    while loop.has_work:
        loop.step()
