"""What one pass saw, as frozen values.

Out of observe.py, into checks, plan and tuning. Times are Unix seconds. Knows no client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plimsoll_operator.spec import Deployment

Json = dict[str, Any]


@dataclass(frozen=True)
class Credentials:
    """PEM certificate and key of the engines' control channel, and the bearer token."""

    certificate: bytes
    key: bytes
    token: bytes = field(repr=False)


@dataclass(frozen=True)
class Termination:
    """How a container ended. ``message`` is its termination log or the end of its output."""

    reason: str
    exit_code: int
    message: str
    started_at: float
    finished_at: float


@dataclass(frozen=True)
class Container:
    """The engine container. ``waiting`` and ``waiting_message`` are None while it runs;
    ``termination`` is its most recent end, None when it never ended."""

    image: str
    ready: bool
    restarts: int
    waiting: str | None = None
    waiting_message: str | None = None
    termination: Termination | None = None
    ended: bool = False


@dataclass(frozen=True)
class Pod:
    name: str
    uid: str
    ordinal: int
    ip: str | None
    node: str | None
    revision: str
    created_at: float
    deleting: bool
    ready: bool
    ready_since: float | None
    phase: str
    # Why the scheduler found no node, in its words.
    unschedulable: str | None
    container: Container | None


@dataclass(frozen=True)
class StatefulSet:
    """``current`` is the revision that every pod had last, ``update`` the one of the template."""

    replicas: int
    partition: int
    generation: int
    observed_generation: int
    current_revision: str
    update_revision: str


@dataclass(frozen=True)
class Observed:
    """``resource`` is the LLMDeployment as read, ``children`` every child by kind and name (None:
    absent), ``changed_at`` when anybody last wrote the LLMDeployment's spec or metadata."""

    deployment: Deployment
    resource: Json
    changed_at: float
    children: Mapping[tuple[str, str], Json | None]
    statefulset: StatefulSet | None
    pods: tuple[Pod, ...]
    credentials: Credentials | None

    @property
    def status(self) -> Json:
        """The status as last written; empty on a new object."""
        status: Json = self.resource.get("status", {})
        return status
