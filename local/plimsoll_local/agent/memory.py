"""How much memory a container uses, and when to look again.

A user namespace cannot make cgroups, so the limit is kept by looking: anonymous pages plus shared
memory of every process in the container, as a memory cgroup would count them. Reading the sum of
/proc/PID/status is cheap but counts a page shared by a fork twice, so before a container with
several processes is called over its limit the exact, dearer count is taken.

In: the pid of the container's first process. Out: bytes, and seconds until the next look.
This module kills nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

from plimsoll_local.agent.linux import share_memory_space

MEBIBYTE = 1 << 20
# Faster than one core faults in fresh pages; a look every 10 ms bounds what can be missed.
ALLOCATION_RATE = 4096 * MEBIBYTE
MIN_INTERVAL = 0.010
MAX_INTERVAL = 0.100
# How long the pages found to be counted twice may be taken off without counting exactly again:
# so long that exact counting takes at most a twentieth of the time, and never less than this.
MIN_CORRECTION_LIFETIME = 0.05
CORRECTION_COST_FACTOR = 20


def poll_interval(used: int, limit: int) -> float:
    """Seconds until the limit could be reached from ``used`` bytes, within 10 to 100 ms."""
    return min(max((limit - used) / ALLOCATION_RATE, MIN_INTERVAL), MAX_INTERVAL)


def sum_fields(status: bytes, names: Iterable[bytes]) -> int:
    """The sum in bytes of fields such as ``RssAnon:`` in the text of a /proc file; an absent field,
    as for a process that has just ended, is 0."""
    total = 0
    for name in names:
        start = status.find(b"\n" + name)
        if start >= 0:
            total += int(status[start + 1 + len(name) :].split(None, 1)[0]) * 1024
    return total


class MemoryMeter:
    """Measures one container. ``shared_memory`` are tmpfs directories whose files it may have
    written; a page that is both mapped and in such a file is counted once."""

    def __init__(
        self,
        first_process: int,
        shared_memory: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._namespace = os.readlink(f"/proc/{first_process}/ns/pid")
        # The container's own /proc lists its processes and no others.
        self._processes = os.open(f"/proc/{first_process}/root/proc", os.O_RDONLY | os.O_DIRECTORY)
        self._status_files: dict[str, int] = {}
        self._shared_memory = [os.open(path, os.O_RDONLY) for path in shared_memory]
        self._clock = clock
        self._counted_twice = 0
        self._count_again_at = float("-inf")

    def used(self, limit: int) -> int:
        """Bytes in use now; exact when that matters for ``limit``. Too little, for a moment, only
        while processes that were forked make shared pages their own."""
        anonymous, shared, processes = self._quick_sum()
        if processes < 2 or anonymous + shared <= limit:
            return anonymous + shared
        began = self._clock()
        estimate = anonymous + shared - self._counted_twice
        if estimate > limit or began >= self._count_again_at:
            exact = self._exact_sum()
            ended = self._clock()
            self._counted_twice = anonymous + shared - exact
            self._count_again_at = ended + max(
                MIN_CORRECTION_LIFETIME, CORRECTION_COST_FACTOR * (ended - began)
            )
            estimate = exact
        return estimate

    def _quick_sum(self) -> tuple[int, int, int]:
        """Anonymous bytes, shared bytes and the number of processes."""
        anonymous = mapped = 0
        names = [name for name in os.listdir(self._processes) if name[0].isdigit()]
        for name in names:
            status = self._read_status(name)
            anonymous += sum_fields(status, (b"RssAnon:",))
            mapped += sum_fields(status, (b"RssShmem:",))
        for name in self._status_files.keys() - set(names):
            os.close(self._status_files.pop(name))
        return anonymous, max(mapped, self._in_files()), len(names)

    def _read_status(self, name: str) -> bytes:
        try:
            if name not in self._status_files:
                self._status_files[name] = os.open(
                    f"{name}/status", os.O_RDONLY, dir_fd=self._processes
                )
            return os.pread(self._status_files[name], 4096, 0)
        except (FileNotFoundError, ProcessLookupError):
            # Ended since the listing. A new process may get the same number: open it afresh then.
            if name in self._status_files:
                os.close(self._status_files.pop(name))
            return b""

    def _in_files(self) -> int:
        used = 0
        for directory in self._shared_memory:
            figures = os.fstatvfs(directory)
            used += (figures.f_blocks - figures.f_bfree) * figures.f_frsize
        return used

    def _exact_sum(self) -> int:
        counted: list[int] = []
        anonymous = mapped = 0
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.readlink(f"/proc/{name}/ns/pid") != self._namespace:
                    continue
                # Between vfork and exec two processes are one address space.
                if any(share_memory_space(int(name), other) for other in counted):
                    continue
                with open(f"/proc/{name}/smaps_rollup", "rb") as file:
                    rollup = file.read()
            except (FileNotFoundError, ProcessLookupError):
                continue
            counted.append(int(name))
            anonymous += sum_fields(rollup, (b"Pss_Anon:",))
            mapped += sum_fields(rollup, (b"Pss_Shmem:",))
        return anonymous + max(mapped, self._in_files())

    def close(self) -> None:
        for descriptor in (self._processes, *self._status_files.values(), *self._shared_memory):
            os.close(descriptor)
        self._status_files.clear()
