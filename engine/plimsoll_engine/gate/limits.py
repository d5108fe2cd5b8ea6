"""The gate's limits in force, and how a request to move them is answered.

In: a revision, the limits asked for, and what the upstream tells of its own. Out: applied at once
or rejected with field, value and what is allowed. What only a restart of vLLM moves (its memory,
its batch) is rejected, unless it is in force already.
"""

from __future__ import annotations

from dataclasses import replace

from plimsoll_engine.limits import (
    LimitBounds,
    Limits,
    LimitsOutcome,
    LimitsResult,
    find_violation,
    merge_limits,
)

_OF_THE_UPSTREAM = ("gpu_memory_utilization", "max_num_batched_tokens", "watermark")


class GateLimits:
    """``current`` is what was asked for: ``max_model_len`` None is the ceiling."""

    def __init__(self, limits: Limits, revision: int, *, floor: int) -> None:
        self.current = limits
        self.revision = revision
        # max_num_seqs at its widest.
        self.max_num_seqs_ever = limits.max_num_seqs or 1
        self.reason = ""
        self._floor = floor
        self._asked: Limits | None = None

    def admitted(self, ceiling: int) -> int:
        return min(ceiling, self.current.max_model_len or ceiling)

    def effective(self, ceiling: int | None, utilization: float | None) -> Limits:
        """In force now, as far as known."""
        length = self.current.max_model_len if ceiling is None else self.admitted(ceiling)
        return replace(self.current, max_model_len=length, gpu_memory_utilization=utilization)

    def move(
        self, revision: int, asked: Limits, *, ceiling: int | None, utilization: float | None
    ) -> LimitsResult:
        if revision < self.revision:
            return self._reject(
                f"revision: {revision} is stale; {self.revision} is in force", ceiling, utilization
            )
        if revision == self.revision and self._asked is not None:
            if asked == self._asked:
                return self._result(LimitsOutcome.APPLIED, "", ceiling, utilization)
            reason = f"revision: {revision} is in force with other limits"
            return self._reject(reason, ceiling, utilization)
        own = replace(asked, gpu_memory_utilization=None)
        if violation := self._find_violation(asked, ceiling, utilization):
            return self._reject(violation, ceiling, utilization)
        self.current = merge_limits(self.current, own)
        self.revision, self._asked = revision, asked
        return self._result(LimitsOutcome.APPLIED, "", ceiling, utilization)

    def _find_violation(
        self, asked: Limits, ceiling: int | None, utilization: float | None
    ) -> str | None:
        for name in _OF_THE_UPSTREAM:
            value = getattr(asked, name)
            in_force = utilization if name == "gpu_memory_utilization" else None
            if value is not None and value != in_force:
                return f"{name}: {value} is not allowed; expected none: vLLM moves it by a restart"
        length = asked.max_model_len
        if length is not None:
            if ceiling is None:
                return f"max_model_len: {length} cannot be judged: the upstream does not answer"
            if length < self._floor:
                return (
                    f"max_model_len: {length} is not allowed; expected {self._floor} (the floor) "
                    f"to {ceiling} (the ceiling)"
                )
        widest = LimitBounds(ceiling or 1, self.max_num_seqs_ever, self.max_num_seqs_ever)
        return find_violation(replace(asked, gpu_memory_utilization=None), widest)

    def _result(
        self,
        outcome: LimitsOutcome,
        reason: str,
        ceiling: int | None,
        utilization: float | None,
    ) -> LimitsResult:
        return LimitsResult(outcome, reason, self.revision, self.effective(ceiling, utilization))

    def _reject(self, reason: str, ceiling: int | None, utilization: float | None) -> LimitsResult:
        return self._result(LimitsOutcome.REJECTED, reason, ceiling, utilization)
