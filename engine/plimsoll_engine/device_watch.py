"""The device's memory over the last minute: free now, the lowest it has been, and the peak.

In: an executor's measurements, the bytes of the KV pool, and the time. Out: a DeviceMemory whose
low water is that of the window, and the most that anything beside the pool took in it. Knows no
other classes of memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from plimsoll_engine.executor import DeviceMemory, Executor

# Measuring asks the driver or the kernel, on every rank: not in each step.
_PERIOD = 0.25
_WINDOW = 60.0


class _WindowMax:
    """The largest value of the last minute."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, int]] = deque()

    def add(self, now: float, value: int) -> int:
        while self._kept and self._kept[0][0] < now - _WINDOW:
            self._kept.popleft()
        # What is not larger than a later value can never be the largest again.
        while self._kept and self._kept[-1][1] <= value:
            self._kept.pop()
        self._kept.append((now, value))
        return self._kept[0][1]


class DeviceWatch:
    """Times in seconds of one clock; ``kv_bytes`` gives the pool's size at any time."""

    def __init__(self, executor: Executor, now: float, kv_bytes: Callable[[], int]) -> None:
        self._executor = executor
        self._kv_bytes = kv_bytes
        self._kv_before = kv_bytes()
        self._used = _WindowMax()
        self._beside_kv = _WindowMax()
        self.measure(now)

    def measure(self, now: float) -> DeviceMemory:
        measured = self._executor.memory(reset_low_water=True)
        self._measured_at = now
        peak = measured.total - measured.free_low_water
        # The peak may lie before a resize since the last measurement: the larger pool was there.
        kv_now = self._kv_bytes()
        self.peak_beside_kv = self._beside_kv.add(now, peak - max(kv_now, self._kv_before))
        self._kv_before = kv_now
        low_water = measured.total - self._used.add(now, peak)
        self.latest = replace(measured, free_low_water=low_water)
        return self.latest

    def measure_if_due(self, now: float) -> None:
        # A figure from before a resize beside the pool's new size would tell of neither.
        resized = self._kv_bytes() != self._kv_before
        if resized or not 0 <= now - self._measured_at < _PERIOD:
            self.measure(now)
