"""Where tensors live: one interface for the CPU and for a CUDA device.

In: the configuration. Out: the torch device, its memory in bytes (total, used, the peak between
two looks), and a way to hand cached memory back. It knows nothing of models or batches.

On the CPU "device memory" is the container's: the limit and the use of this process as
``host_memory`` counts them. glibc is told to give large blocks back as soon as they are freed;
otherwise the resident size would tell of the past, and a plan made from it would be wrong.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from plimsoll_engine import host_memory
from plimsoll_engine.config import EngineConfig
from plimsoll_engine.executor import AllocationFailure
from plimsoll_engine.termination import EngineFailure, FailureClass, Phase

# mallopt parameters of glibc (malloc.h).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
# Blocks above this size get a mapping of their own, returned on free. Setting it also stops glibc
# from raising it by itself to 32 MiB.
_MMAP_THRESHOLD = 4 << 20


@dataclass(frozen=True)
class DeviceUse:
    """Bytes. On the CPU ``used`` and ``peak`` are this process's share of ``total``."""

    total: int
    used: int
    # Highest ``used`` since the previous look that reset it.
    peak: int


class Recorder(Protocol):
    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Runs ``work``, which reads and writes tensors that stay where they are, and gives what
        repeats it on whatever they hold then. What one recording takes in between may be taken by
        the next one too: they never run at the same time."""


class Device(Protocol):
    torch_device: torch.device

    def use(self, *, reset_peak: bool = False) -> DeviceUse: ...

    def reclaim(self) -> None:
        """Hands freed memory back to the system."""

    def measuring(self) -> AbstractContextManager[None]:
        """A context in which the peak is watched."""

    def recorder(self) -> Recorder | None:
        """None where work cannot be recorded."""


class CpuDevice:
    def __init__(self, limit: host_memory.MemoryLimit) -> None:
        self.torch_device = torch.device("cpu")
        self._limit = limit
        self._libc = ctypes.CDLL(None)
        # Not glibc: no such functions, and then nothing to tune.
        if hasattr(self._libc, "mallopt"):
            self._libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
            self._libc.mallopt(_M_TRIM_THRESHOLD, _MMAP_THRESHOLD)
            self._libc.mallopt(_M_ARENA_MAX, 2)
        self._sampler = host_memory.PeakSampler()

    def use(self, *, reset_peak: bool = False) -> DeviceUse:
        peak = self._sampler.peak(reset=reset_peak)
        return DeviceUse(self._limit.available, self._sampler.sample(), peak)

    def reclaim(self) -> None:
        gc.collect()
        if hasattr(self._libc, "malloc_trim"):
            self._libc.malloc_trim(0)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        self._sampler.start()
        try:
            yield
        finally:
            self._sampler.stop()

    def recorder(self) -> None:
        return None


class CudaDevice:
    """Memory outside torch's allocator (context, libraries, other processes) counts as used. With
    ``device_memory``, what is used already is not counted: that much is to be had beside it."""

    def __init__(self, index: int, device_memory: int | None) -> None:
        if not torch.cuda.is_available():
            raise EngineFailure(
                FailureClass.INVALID_CONFIGURATION,
                Phase.CONFIGURATION,
                "--device cuda: torch finds no CUDA device here; allowed: cpu, or a machine "
                "(and a torch build) with CUDA",
            )
        if index >= torch.cuda.device_count():
            raise EngineFailure(
                FailureClass.INVALID_CONFIGURATION,
                Phase.CONFIGURATION,
                f"--tensor-parallel-size needs CUDA device {index}, and there are only "
                f"{torch.cuda.device_count()}",
                suggestion={"flag": "--tensor-parallel-size", "value": torch.cuda.device_count()},
            )
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        free, physical = torch.cuda.mem_get_info(self.torch_device)
        self._beside = 0 if device_memory is None else physical - free
        self._total = physical if device_memory is None else min(device_memory, free)
        self._peak = 0
        self._sample()

    def _sample(self) -> DeviceUse:
        free, physical = torch.cuda.mem_get_info(self.torch_device)
        used = max(0, physical - free - self._beside)
        # The caching allocator keeps what a step took, so looking after it sees its peak.
        self._peak = max(self._peak, used)
        return DeviceUse(self._total, used, self._peak)

    def use(self, *, reset_peak: bool = False) -> DeviceUse:
        use = self._sample()
        if reset_peak:
            self._peak = use.used
        return use

    def reclaim(self) -> None:
        # What a failed step has queued may still read the memory that it was prepared in.
        torch.cuda.synchronize(self.torch_device)
        gc.collect()
        torch.cuda.empty_cache()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._sample()

    def recorder(self) -> CudaRecorder:
        return CudaRecorder(self.torch_device)


class CudaRecorder:
    """CUDA graphs with one pool of memory and one stream. Collectives are recorded as any kernel."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        # Kernels are compiled and libraries take their buffers now: a recording allows neither.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads (NCCL's watchdog) may ask the device something meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        except RuntimeError as error:
            # Ending a recording that found no memory may fail in turn, and says less.
            cause = error.__context__
            raise cause if isinstance(cause, torch.OutOfMemoryError) else error from None
        return graph.replay


def open_device(kind: str, config: EngineConfig, index: int = 0) -> Device:
    """``kind`` is "cpu" or "cuda"; ``index`` picks one of several CUDA devices."""
    if kind == "cpu":
        return CpuDevice(host_memory.memory_limit(config.device_memory, config.memory_limit))
    return CudaDevice(index, config.device_memory)


def allocation_failure(error: BaseException) -> AllocationFailure | None:
    """The AllocationFailure an exception stands for; None when it is about something else."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return AllocationFailure(str(error) or "out of memory")
    # torch's CPU allocator raises a plain RuntimeError.
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
        return AllocationFailure(str(error))
    return None
