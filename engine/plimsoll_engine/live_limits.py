"""The limits in force, and how a request to move them is answered.

In: a revision and the limits asked for. Out: APPLIED, DEFERRED or REJECTED with the figure. Either
all of a request is in force (or on its way) or none of it. Knows the pool's size through the
resizer, the device through the watch; no channel and no file.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from plimsoll_engine.device_watch import DeviceWatch
from plimsoll_engine.executor import AllocationFailure, Executor
from plimsoll_engine.limits import (
    LimitBounds,
    Limits,
    LimitsOutcome,
    LimitsResult,
    find_violation,
    merge_limits,
)
from plimsoll_engine.memory import MemoryPlan, format_bytes
from plimsoll_engine.resizing import PoolResizer
from plimsoll_engine.scheduler import Scheduler, SchedulerLimits

log = logging.getLogger(__name__)


class LiveLimits:
    """``current`` has no None; ``plan`` is the memory plan at the utilization in force."""

    def __init__(
        self,
        limits: Limits,
        revision: int,
        *,
        plan: MemoryPlan,
        bounds: LimitBounds,
        scheduler: Scheduler,
        resizer: PoolResizer,
        executor: Executor,
        watch: DeviceWatch,
    ) -> None:
        self.current = limits
        self.revision = revision
        self.plan = plan
        self._bounds = bounds
        self._scheduler = scheduler
        self._resizer = resizer
        self._executor = executor
        self._watch = watch
        self._asked: Limits | None = None
        self._note = ""

    @property
    def admitted(self) -> int:
        assert self.current.max_model_len is not None
        return self.current.max_model_len

    @property
    def outcome(self) -> LimitsOutcome:
        """Of the revision in force."""
        return LimitsOutcome.APPLIED if self._resizer.settled else LimitsOutcome.DEFERRED

    @property
    def reason(self) -> str:
        return self._note if self._resizer.settled else self._resizer.waiting_for

    def move(self, revision: int, asked: Limits, now: float) -> LimitsResult:
        if revision < self.revision:
            return self._reject(f"revision: {revision} is stale; {self.revision} is in force")
        if revision == self.revision and self._asked is not None:
            if asked == self._asked:
                return self._result()
            return self._reject(f"revision: {revision} is in force with other limits")
        merged = merge_limits(self.current, asked)
        if violation := find_violation(asked, self._bounds) or find_violation(merged, self._bounds):
            return self._reject(violation)
        blocks, note = self._resizer.target, ""
        if asked.gpu_memory_utilization is not None:
            blocks, note = self._pool_at(asked.gpu_memory_utilization, now)
        if too_small := self._find_shortage(merged, blocks, note):
            return self._reject(too_small)
        try:
            self._resizer.move(blocks)
        except AllocationFailure as failure:
            return self._reject(f"gpu_memory_utilization: the device refused the memory: {failure}")

        self._scheduler.limits = scheduler_limits(merged)
        assert merged.gpu_memory_utilization is not None
        self.plan = self.plan.at(merged.gpu_memory_utilization, blocks)
        self.current, self.revision, self._asked, self._note = merged, revision, asked, note
        log.info("limits revision %d %s: %s", revision, self.outcome, merged)
        return self._result()

    def settle(self) -> None:
        self._resizer.settle()

    def _pool_at(self, utilization: float, now: float) -> tuple[int, str]:
        """Blocks at ``utilization``, clamped to the memory that is really free, and a note when it
        was."""
        wanted = self.plan.blocks_at(utilization)
        if wanted <= self._resizer.committed:
            return wanted, ""
        self._executor.reclaim()
        free = self._watch.measure(now).free
        possible = max(self._resizer.target, self._resizer.committed + self.plan.room(free))
        if wanted <= possible:
            return wanted, ""
        return possible, (
            f"the pool has {possible} of {wanted} blocks: only {format_bytes(free)} are free"
        )

    def _find_shortage(self, limits: Limits, blocks: int, note: str) -> str | None:
        """One request of the admitted length must fit the pool, or it would never be served."""
        assert limits.max_model_len is not None
        needed = self.plan.blocks_for(limits.max_model_len)
        if blocks >= needed:
            return None
        least = self.plan.utilization_for(needed)
        explanation = f" ({note})" if note else ""
        return (
            f"gpu_memory_utilization: a request of the admitted {limits.max_model_len} tokens needs "
            f"{needed} blocks, the pool would have {blocks}{explanation}; expected at least "
            f"{least:g}, or max_model_len at most {blocks * self.plan.block_size}"
        )

    def _result(self) -> LimitsResult:
        return LimitsResult(self.outcome, self.reason, self.revision, self.current)

    def _reject(self, reason: str) -> LimitsResult:
        log.warning("limits rejected: %s", reason)
        return replace(self._result(), outcome=LimitsOutcome.REJECTED, reason=reason)


def scheduler_limits(limits: Limits) -> SchedulerLimits:
    assert limits.max_num_seqs is not None
    assert limits.max_num_batched_tokens is not None
    assert limits.watermark is not None
    assert limits.long_prompt_share is not None
    return SchedulerLimits(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        watermark=limits.watermark,
        long_prompt_tokens=limits.long_prompt_tokens,
        long_prompt_share=limits.long_prompt_share,
        long_queue_share=limits.long_queue_share,
    )
