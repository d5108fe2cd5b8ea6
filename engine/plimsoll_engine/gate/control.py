"""The gate as what an EngineControl channel drives.

In: calls on the channel's threads. Out: the gate's answers, computed on its event loop. What the
upstream does not tell stays absent in a report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from plimsoll_engine.control.reports import limits_to_wire
from plimsoll_engine.gate.gate import Gate
from plimsoll_engine.gate.upstream_state import UpstreamMetrics
from plimsoll_engine.limits import Limits, LimitsResult
from plimsoll_wire import engine_control_pb2 as wire

Result = TypeVar("Result")

# The loop answers within milliseconds; one that does not is lost.
ANSWER_SECONDS = 10.0


class ControlledGate:
    def __init__(self, gate: Gate, loop: asyncio.AbstractEventLoop) -> None:
        self._gate = gate
        self._loop = loop

    def build_report(self) -> wire.MemoryReport:
        async def build() -> wire.MemoryReport:
            return build_report(self._gate)

        return self._on_loop(build())

    def set_limits(self, revision: int, limits: Limits) -> LimitsResult:
        async def move() -> LimitsResult:
            return self._gate.set_limits(revision, limits)

        return self._on_loop(move())

    def drain(self, timeout: float) -> wire.DrainResponse:
        async def drain() -> wire.DrainResponse:
            drained = await self._gate.drain(timeout)
            return wire.DrainResponse(
                drained=drained, running=self._gate.running, waiting=self._gate.waiting
            )

        return self._on_loop(drain(), ANSWER_SECONDS + timeout)

    def _on_loop(
        self, coroutine: Coroutine[Any, Any, Result], seconds: float = ANSWER_SECONDS
    ) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(seconds)


def build_report(gate: Gate) -> wire.MemoryReport:
    state, ceiling = gate.state, gate.ceiling
    metrics = UpstreamMetrics() if state is None else state.metrics
    admitted = None if ceiling is None else gate.limits.admitted(ceiling)
    return wire.MemoryReport(
        engine_version=None if state is None else state.version,
        model=None if state is None else state.model.names[0],
        started_at=metrics.started_at,
        block_size=metrics.block_size,
        committed_blocks=metrics.num_blocks,
        usable_blocks=metrics.num_blocks,
        used_blocks=metrics.used_blocks,
        max_model_len_ceiling=ceiling,
        largest_prompt_admissible=None if admitted is None else admitted - 1,
        limits=limits_to_wire(gate.limits.effective(ceiling, metrics.gpu_memory_utilization)),
        limits_revision=gate.limits.revision,
        limits_outcome=wire.APPLIED,
        running=metrics.running,
        # Those in the gate's own queue wait too, but for those nothing is known of the upstream's.
        waiting=None if metrics.waiting is None else metrics.waiting + gate.waiting,
        preemptions=metrics.preemptions,
    )
