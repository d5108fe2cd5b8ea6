"""What the agent tells a shim about the container it is to run, and what the shim answers.

In and out: frozen values and their JSON, one document per line. Standard library only, because a
shim loads it at every container start. This module knows neither Kubernetes objects nor processes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BindMount:
    """``source`` (file or directory of this machine) shown at ``target`` of the container."""

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class ContainerSpec:
    """Everything a shim needs; all paths are absolute.

    The container sees this machine's files read-only, except ``writable`` (shown as they are) and
    ``hidden`` (shown empty); ``readable`` is seen even below /tmp, /var/tmp and /run. ``scratch`` is a fresh directory behind /tmp, /var/tmp and /run.
    ``root`` is an empty directory to put the new root on. ``memory_limit`` is in bytes;
    ``shared_memory`` are tmpfs directories of the pod whose use counts against it.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    working_directory: str
    host_name: str
    network_namespace: str | None
    root: str
    scratch: str
    log_file: str
    mounts: tuple[BindMount, ...] = ()
    writable: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    memory_limit: int | None = None
    shared_memory: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ContainerSpec:
        values: dict[str, Any] = json.loads(text)
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(value)
        values["mounts"] = tuple(BindMount(**mount) for mount in values["mounts"])
        return cls(**values)


@dataclass(frozen=True)
class Started:
    """The program runs as ``pid`` (in the agent's pid namespace) since ``at`` (Unix seconds)."""

    pid: int
    at: float


@dataclass(frozen=True)
class StartFailed:
    """The program could not be executed, and why."""

    message: str
    at: float


@dataclass(frozen=True)
class Exited:
    """The program ended: its status, or 128 plus the signal that killed it.

    ``out_of_memory`` is true when the shim killed it for passing its memory limit;
    ``peak_memory`` is the most it was seen to use, in bytes.
    """

    exit_code: int
    out_of_memory: bool
    peak_memory: int
    at: float


@dataclass(frozen=True)
class ExecResult:
    """A further program in a container ended: its exit code, and stdout and stderr together."""

    exit_code: int
    output: str


Report = Started | StartFailed | Exited
_REPORTS: dict[str, type[Report]] = {kind.__name__: kind for kind in (Started, StartFailed, Exited)}


def report_to_json(report: Report) -> str:
    return json.dumps({"kind": type(report).__name__, **dataclasses.asdict(report)})


def report_from_json(line: str | bytes) -> Report:
    values = json.loads(line)
    return _REPORTS[values.pop("kind")](**values)
