"""What one pass saw, as frozen values.

Out of observe.py, into checks, plan and tuning. Times are Unix seconds. Knows no client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from plimsoll_operator import shape
from plimsoll_operator.spec import Deployment

Json = dict[str, Any]

# What this operator reads of a status as it was last written; the tuner reads its own parts itself.
_STATUS_SHAPE = shape.record(
    {
        "conditions": shape.list_of(
            shape.record(
                {
                    "type": shape.text,
                    "status": shape.text,
                    "reason": shape.text,
                    "message": shape.text,
                    "observedGeneration": shape.integer,
                    "lastTransitionTime": shape.time,
                },
                required=(
                    "type",
                    "status",
                    "reason",
                    "message",
                    "observedGeneration",
                    "lastTransitionTime",
                ),
            )
        ),
        "effective": shape.record(
            {
                "maxModelLen": shape.positive,
                "maxModelLenCeiling": shape.positive,
                "gpuMemoryUtilization": shape.share,
                "source": shape.text,
            }
        ),
        "failures": shape.record(
            {"last": shape.record({"time": shape.time}, required=("time",))},
        ),
        "revision": shape.record(
            {
                "current": shape.text,
                "lastKnownGood": shape.text,
                "blocked": shape.list_of(shape.text),
            }
        ),
        "rollout": shape.record(
            {
                "step": shape.text,
                "message": shape.text,
                "strategy": shape.text,
                "strategyReason": shape.text,
                "proven": shape.text,
                "canary": shape.record({"pod": shape.text}),
            }
        ),
        "avoidedNodes": shape.list_of(
            shape.record(
                {
                    "node": shape.text,
                    "pod": shape.text,
                    "time": shape.time,
                    "message": shape.text,
                },
                required=("node", "pod", "time", "message"),
            )
        ),
        "load": shape.record({"time": shape.time}),
        "prefetch": shape.record({"completed": shape.text}),
        "inferencePool": shape.text,
        "tuning": shape.record({}),
        "oom": shape.record({}),
    }
)


def read_status(resource: Json) -> Json:
    """The status as last written, without what cannot be read; empty on a new object."""
    status: Json = _STATUS_SHAPE(resource.get("status")) or {}
    return status


def seconds(timestamp: str) -> float:
    """An RFC 3339 time of the API server as Unix seconds."""
    return datetime.fromisoformat(timestamp).timestamp()


@dataclass(frozen=True)
class Credentials:
    """PEM certificate and key of the engines' control channel, and the bearer token. ``group`` is the token
    with which the pods of a group know each other; it stays for as long as the Secret does. ``previous`` are
    those before the last rotation, without their key: engines may still have them."""

    certificate: bytes
    key: bytes
    token: bytes = field(repr=False)
    group: bytes = field(default=b"", repr=False)
    previous: Credentials | None = None


@dataclass(frozen=True)
class Termination:
    """How a container ended. ``message`` is its termination log or the end of its output."""

    reason: str
    exit_code: int
    message: str
    started_at: float | None
    finished_at: float | None


@dataclass(frozen=True)
class Container:
    """The engine container, or the gate. ``started``: it runs and its start-up is over. ``waiting`` is None while
    it does not wait; ``termination`` is its most recent end, None when it never ended; ``ended``
    says that it has ended and nothing has been started since. ``memory_limit`` is its own: the spec's may
    have been changed after it was made."""

    image: str
    ready: bool
    started: bool
    restarts: int
    waiting: str | None = None
    waiting_message: str | None = None
    termination: Termination | None = None
    ended: bool = False
    memory_limit: str | None = None


@dataclass(frozen=True)
class Disruption:
    """Why a pod is, or was, taken from its node: preemption, eviction, a taint, a shutdown."""

    reason: str
    message: str
    at: float | None


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
    unschedulable_since: float | None = None
    disruption: Disruption | None = None
    # Its own revision, where ``revision`` is the wanted one that counts as the same.
    made_as: str | None = None
    # Only where the engine is stock vLLM: the gate before it, which has the ports.
    gate: Container | None = None
    # Of a replica that is a group: its other pods. Readiness is then the group's, the rest the leader's.
    members: tuple[Pod, ...] = ()
    # Its container's last end came before it was deleted, and not from that.
    ended_before: bool = False

    @property
    def serves(self) -> bool:
        """Its start-up is over and it is not going away."""
        parts = [self.container] if self.gate is None else [self.container, self.gate]
        return not self.deleting and all(part is not None and part.started for part in parts)


@dataclass(frozen=True)
class StatefulSet:
    """Or the LeaderWorkerSet in its place (groups.py), whose replicas are groups.
    ``current_revision`` is what every pod had last, ``update_revision`` that of the template;
    ``template_hash`` names the template as the operator applied it."""

    replicas: int
    partition: int
    generation: int
    observed_generation: int
    current_revision: str
    update_revision: str
    template_hash: str | None = None
    # The controller replaces nothing by itself; what is deleted comes back with the template.
    on_delete: bool = False
    # Nodes that its template keeps pods from; revisions that differ from it in those alone.
    avoided: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()
    # Somebody else has set fields of it, perhaps in the template: they are put back in this pass.
    foreign: bool = False
    # When the operator last changed it.
    applied_at: float | None = None


class Unusable(StrEnum):
    """Why a kind of another project is of no use here; the end of a condition's reason."""

    NOT_INSTALLED = "NotInstalled"
    FORBIDDEN = "Forbidden"


@dataclass(frozen=True)
class Observed:
    """``resource`` is the LLMDeployment as read, ``children`` every child by kind and name (None:
    absent), ``changed_at`` when anybody last wrote the LLMDeployment's spec or metadata,
    ``profile`` the MemoryProfile with what was learned before (None: nothing yet)."""

    deployment: Deployment
    resource: Json
    changed_at: float
    children: Mapping[tuple[str, str], Json | None]
    statefulset: StatefulSet | None
    pods: tuple[Pod, ...]
    credentials: Credentials | None
    profile: Json | None = None
    # Pods of the Job that fetches the model, as the API server has them.
    prefetch_pods: tuple[Json, ...] = ()
    # Kinds of other projects that the spec asks for and that cannot be used, with the reason.
    unusable: Mapping[str, Unusable] = field(default_factory=dict)

    @property
    def status(self) -> Json:
        return read_status(self.resource)
