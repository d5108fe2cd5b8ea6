"""The kubelet's growing delay between restarts of a container or tries at an image.

In: the last delay given out, times in Unix seconds. Out: the next one, or when it is over. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll_local.agent.state import BackOff


@dataclass(frozen=True)
class BackOffPolicy:
    """Delays of ``base`` seconds, doubled up to ``cap``; forgotten when something ran for
    ``reset_after`` seconds since the last delay began. The kubelet's are 10, 300 and 600."""

    base: float = 10.0
    cap: float = 300.0
    reset_after: float = 600.0

    def ends_at(self, back_off: BackOff | None, failed_at: float) -> float:
        """When a thing that failed at ``failed_at`` may be tried again."""
        if back_off is None or self._is_over(back_off, failed_at):
            return failed_at
        return failed_at + back_off.delay

    def next(self, back_off: BackOff | None, failed_at: float, now: float) -> BackOff:
        """The back-off after one more try, begun now, for a thing that failed at ``failed_at``."""
        if back_off is None or self._is_over(back_off, failed_at):
            return BackOff(self.base, now)
        return BackOff(min(back_off.delay * 2, self.cap), now)

    def _is_over(self, back_off: BackOff, failed_at: float) -> bool:
        return failed_at - back_off.since > self.reset_after
