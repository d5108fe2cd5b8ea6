"""What the executor and its ranks say to each other, over one connection per rank: a pipe, or TCP
into another pod.

The executor sends a :class:`Start` and then :class:`Call`s to all ranks; each rank answers a call
with one reply, and sends a :class:`Heartbeat` every second, whatever else it does. The ranks' parent
process has a pipe too: it tells the ranks' process ids, then the end of each. This module knows no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from plimsoll_engine.config import EngineConfig
from plimsoll_engine.termination import EngineFailure

HEARTBEAT_SECONDS = 1.0


@dataclass(frozen=True)
class Start:
    config: EngineConfig
    device_kind: str
    rank: int
    # Those of its pod, this one among them.
    pod_ranks: range
    # Where ranks find each other, as torch.distributed has it: a file in a folder of the executor's
    # own that does not exist yet, or a port of the first rank's pod.
    rendezvous: str


@dataclass(frozen=True)
class Call:
    """A method of ModelRunner by name."""

    method: str
    arguments: tuple[object, ...] = ()
    keywords: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True)
class MemoryUse:
    """Bytes; on the CPU this rank's share of ``total``."""

    total: int
    used: int
    # Highest since the reply before.
    peak: int


@dataclass(frozen=True)
class Done:
    result: object
    memory: MemoryUse


@dataclass(frozen=True)
class OutOfMemory:
    """The call raised AllocationFailure; the rank goes on."""

    message: str
    requested_bytes: int | None


@dataclass(frozen=True)
class Failed:
    """The rank ends. ``failure`` has an EngineFailure's fields (exceptions of several arguments do
    not travel between processes); None for an exception that nobody foresaw."""

    message: str
    failure: dict[str, Any] | None = None


def failed(failure: EngineFailure) -> Failed:
    return Failed(
        failure.message,
        {field.name: getattr(failure, field.name) for field in fields(failure)},
    )


@dataclass(frozen=True)
class Heartbeat:
    # Collectives that the rank has entered: the same for all, but for those that lag behind.
    collectives: int = 0


@dataclass(frozen=True)
class Spawned:
    """Process ids in rank order."""

    pids: tuple[int, ...]


@dataclass(frozen=True)
class Ended:
    """``status`` is the exit code, or minus the number of the signal."""

    rank: int
    status: int


Reply = Done | OutOfMemory | Failed
