"""Limits as a container has them, use as its enforcer counts it, and peaks inside a step."""

from __future__ import annotations

import mmap
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from plimsoll_engine import host_memory
from plimsoll_engine.device import CpuDevice, allocation_failure

MIB = 1 << 20


def fake_root(folder: Path, cgroup: str, files: dict[str, str]) -> Path:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = folder / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        ("0::/\n", {"memory.max": "1000\n"}, 1000),
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("0::/\n", {}, None),
        # The smallest on the way up counts.
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "500\n"}, 500),
        ("0::/a/b\n", {"a/b/memory.max": "400\n", "a/memory.max": "500\n"}, 400),
        # Version 1, seen from inside the container: the path is not below the mount.
        ("5:cpu:/x\n4:memory:/pod\n", {"memory/memory.limit_in_bytes": "2000\n"}, 2000),
        ("4:memory:/pod\n", {"memory/pod/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    ],
)
def test_cgroup_limit(
    tmp_path: Path, cgroup: str, files: dict[str, str], limit: int | None
) -> None:
    assert host_memory.cgroup_limit(fake_root(tmp_path, cgroup, files)) == limit


def test_smallest_limit_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = host_memory.machine_bytes()
    assert 0 < host_memory.memory_limit().available <= machine
    assert host_memory.memory_limit(200 * MIB, 300 * MIB).available == 200 * MIB
    assert host_memory.memory_limit(machine * 2).available <= machine
    monkeypatch.setattr(host_memory, "cgroup_limit", lambda: 100 * MIB)
    monkeypatch.setattr(host_memory, "shared_file_bytes", lambda: 0)
    assert host_memory.memory_limit(200 * MIB, 300 * MIB).available == 100 * MIB


def test_files_in_shared_memory_count_as_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in no process, and the container is killed for them all the same."""
    monkeypatch.setattr(host_memory, "cgroup_limit", lambda: None)
    device = CpuDevice(host_memory.memory_limit(None, 900 * MIB))
    before = device.use().total
    with tempfile.NamedTemporaryFile(dir=host_memory.SHARED_MEMORY) as file:
        file.write(bytes(8 * MIB))
        file.flush()
        assert host_memory.shared_file_bytes() >= 8 * MIB
        assert before - device.use().total >= 7 * MIB
    # What the user gives the engine is the engine's alone.
    assert CpuDevice(host_memory.memory_limit(200 * MIB)).use().total == 200 * MIB


def test_a_machine_without_shared_memory_has_none_in_use(tmp_path: Path) -> None:
    assert host_memory.shared_file_bytes(tmp_path / "nothing") == 0


def test_without_a_limit_what_others_use_is_not_the_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "cgroup_limit", lambda: None)
    monkeypatch.setattr(host_memory, "machine_bytes", lambda: 1000 * MIB)
    monkeypatch.setattr(host_memory, "used_bytes", lambda: 50 * MIB)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 300 * MIB)
    assert host_memory.memory_limit().available == 350 * MIB
    # A limit is a promise of whoever set it.
    assert host_memory.memory_limit(600 * MIB).available == 600 * MIB


def test_available_memory_is_the_kernels_figure(
    available_bytes: Callable[..., int], tmp_path: Path
) -> None:
    root = fake_root(tmp_path, "", {})
    (root / "proc/meminfo").write_text("MemTotal:   900 kB\nMemAvailable:   300 kB\n")
    assert available_bytes(root) == 300 * 1024
    assert 0 < available_bytes() <= host_memory.machine_bytes()


def test_mapped_files_do_not_count_as_use(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(64 * MIB))
    before = host_memory.used_bytes()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        assert sum(mapping[:: mmap.PAGESIZE]) == 0
        assert host_memory.used_bytes() - before < 4 * MIB


def wait_until(condition: object, seconds: float = 10.0) -> bool:
    """Polls a callable; the sampler works on its own thread."""
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def test_peak_inside_a_step_is_seen() -> None:
    device = CpuDevice(host_memory.MemoryLimit(None, 1 << 40))
    before = device.use(reset_peak=True).used
    with device.measuring():
        block = torch.ones(256 * MIB, dtype=torch.uint8)
        assert wait_until(lambda: device._sampler._peak - before >= 256 * MIB)
        del block
    use = device.use(reset_peak=True)
    assert use.peak - before >= 256 * MIB
    # Freed memory has gone back, and the next look begins anew.
    assert use.used - before < 16 * MIB
    assert device.use().peak - before < 16 * MIB


MIDDLING_BLOCKS = """
import torch
from plimsoll_engine.device import CpuDevice
from plimsoll_engine.host_memory import MemoryLimit

device = CpuDevice(MemoryLimit(None, 1 << 40))

def allocate():
    return [torch.ones(8 << 20, dtype=torch.uint8) for _ in range(16)]

for _ in range(3):
    allocate()
before = device.use().used
blocks = allocate()
print(device.use().used - before)
del blocks
print(device.use().used - before)
"""


def test_many_middling_blocks_go_back_too() -> None:
    """glibc would keep blocks below its growing threshold. In a process of its own, as an engine
    is: what others have left free in a heap would be used first."""
    run = subprocess.run(
        [sys.executable, "-c", MIDDLING_BLOCKS], capture_output=True, text=True, check=True
    )
    held, left = map(int, run.stdout.split())
    assert held >= 120 * MIB
    assert left < 16 * MIB


def test_refused_allocations_are_recognised() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert allocation_failure(refused.value) is not None
    assert allocation_failure(MemoryError()) is not None
    assert allocation_failure(torch.OutOfMemoryError("CUDA out of memory")) is not None
    assert allocation_failure(RuntimeError("shape mismatch")) is None
    assert allocation_failure(ValueError("can't allocate memory")) is None
