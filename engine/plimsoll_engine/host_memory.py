"""Host memory as a container's limit counts it: what is allowed, what is used, the peak between.

In: configured limits. Out: bytes. Use is RssAnon plus RssShmem, the memory that nobody can take
back; pages of files (weights that are only mapped, code) can be reclaimed and do not count. Files in
/dev/shm belong to no process and count against the limit itself. This module knows neither torch nor the engine's other modules.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# A node agent kills within about 10 ms of the limit being crossed; half of that sees what it sees.
SAMPLE_SECONDS = 0.005
SHARED_MEMORY = Path("/dev/shm")
# cgroup v1 writes "no limit" as a huge number rounded to pages.
UNLIMITED = 1 << 60


def machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cgroup_limit(root: Path = Path("/")) -> int | None:
    """The smallest limit of this process's cgroup and those above it, version 1 or 2, in bytes.

    ``root`` is where /proc and /sys are looked up. None: no limit is set or readable.
    """
    limits = []
    for directory, name in _memory_cgroups(root):
        try:
            text = (directory / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < UNLIMITED:
            limits.append(int(text))
    return min(limits, default=None)


def _memory_cgroups(root: Path) -> Iterable[tuple[Path, str]]:
    """Folder and limit file of each memory cgroup from this process's own up to the mount."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the path may not exist below the mount: then the mount is the own one.
        own = mount / path.lstrip("/")
        directory = own if own.is_dir() else mount
        while True:
            yield directory, name
            if directory == mount:
                break
            directory = directory.parent


@dataclass(frozen=True)
class MemoryLimit:
    """``container`` is the limit in which the files in /dev/shm count as well; None: there is none.
    ``fixed`` is every other bound."""

    container: int | None
    fixed: int

    @property
    def available(self) -> int:
        """Bytes that the engine's processes may use together, at this moment."""
        if self.container is None:
            return self.fixed
        return max(0, min(self.fixed, self.container - shared_file_bytes()))


def memory_limit(device_memory: int | None = None, pod_limit: int | None = None) -> MemoryLimit:
    """The smallest of the cgroup's limit, the machine's memory, --device-memory and
    PLIMSOLL_MEMORY_LIMIT, the pod's limit by the downward API.

    Without any limit the machine is shared with whatever else runs on it: then it is what this
    process has and what others leave, or the machine would run out while the pool is committed.
    """
    containers = [limit for limit in (cgroup_limit(), pod_limit) if limit is not None]
    if not containers and device_memory is None:
        return MemoryLimit(None, min(machine_bytes(), used_bytes() + available_bytes()))
    fixed = machine_bytes() if device_memory is None else min(machine_bytes(), device_memory)
    return MemoryLimit(min(containers, default=None), fixed)


def shared_file_bytes(folder: Path = SHARED_MEMORY) -> int:
    """What the files in /dev/shm take: memory that is in no process, and that a limit counts."""
    try:
        files = os.statvfs(folder)
    except OSError:
        return 0
    return (files.f_blocks - files.f_bfree) * files.f_frsize


def available_bytes(root: Path = Path("/")) -> int:
    """MemAvailable: what can be had without swapping."""
    return _field((root / "proc/meminfo").read_bytes(), b"MemAvailable:")


def used_bytes() -> int:
    """RssAnon + RssShmem of this process."""
    with open("/proc/self/status", "rb") as status:
        text = status.read()
    return _field(text, b"RssAnon:") + _field(text, b"RssShmem:")


def _field(status: bytes, name: bytes) -> int:
    start = status.index(name) + len(name)
    return int(status[start:].split(None, 1)[0]) * 1024


class PeakSampler:
    """The highest use of this process since the last reset, seen while a step runs.

    The kernel keeps a peak of the total resident size only (VmHWM), which includes mapped files;
    so a thread reads the counters every 5 ms between ``start`` and ``stop``, and both of those
    read once more. An allocation has to be written to count, which takes longer than the interval
    for anything above a few tens of MiB, so a peak is missed by that much at most.
    """

    def __init__(self, interval: float = SAMPLE_SECONDS) -> None:
        self._interval = interval
        self._active = threading.Event()
        self._lock = threading.Lock()
        self._peak = used_bytes()
        threading.Thread(target=self._run, name="memory-sampler", daemon=True).start()

    def start(self) -> None:
        self.sample()
        self._active.set()

    def stop(self) -> None:
        self._active.clear()
        self.sample()

    def sample(self) -> int:
        """Reads now; returns the present use."""
        used = used_bytes()
        with self._lock:
            self._peak = max(self._peak, used)
        return used

    def peak(self, *, reset: bool = False) -> int:
        used = self.sample()
        with self._lock:
            peak = self._peak
            if reset:
                self._peak = used
        return peak

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self._active.wait()
            self.sample()
            pause.wait(self._interval)
