"""The device's memory over the last minute: free now, and the lowest it has been.

In: an executor's measurements and the time. Out: a DeviceMemory whose low water is that of the
window. Knows no classes of memory.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from plimsoll_engine.executor import DeviceMemory, Executor

# Measuring asks the driver or the kernel, on every rank: not in each step.
_PERIOD = 0.25
_WINDOW = 60.0


class DeviceWatch:
    """Times in seconds of one clock."""

    def __init__(self, executor: Executor, now: float) -> None:
        self._executor = executor
        self._low: deque[tuple[float, int]] = deque()
        self.measure(now)

    def measure(self, now: float) -> DeviceMemory:
        measured = self._executor.memory(reset_low_water=True)
        self._measured_at = now
        while self._low and self._low[0][0] < now - _WINDOW:
            self._low.popleft()
        # A higher or equal value before a lower one can never be the lowest again.
        while self._low and self._low[-1][1] >= measured.free_low_water:
            self._low.pop()
        self._low.append((now, measured.free_low_water))
        self.latest = replace(measured, free_low_water=self._low[0][1])
        return self.latest

    def measure_if_due(self, now: float) -> None:
        if not 0 <= now - self._measured_at < _PERIOD:
            self.measure(now)
