"""A MemoryAdvisor as frozen values, with every default filled in.

In: the object as the API server returned it (the schema and its CEL rules already hold). Out: an
:class:`Advisor`. Knows no cluster; the defaults are those that the CRD's descriptions promise.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from plimsoll_operator.spec import Bounds, parse_duration

Json = dict[str, Any]


class TargetKind(StrEnum):
    DEPLOYMENT = "Deployment"
    STATEFUL_SET = "StatefulSet"
    LEADER_WORKER_SET = "LeaderWorkerSet"


@dataclass(frozen=True)
class Metrics:
    """Where a pod's page is. ``port`` None: where vLLM's --port says, else 8000; a text is the name
    of a container port. ``model`` None: the only one on the page. ``interval`` in seconds."""

    port: int | str | None
    path: str
    tls: bool
    model: str | None
    interval: float


@dataclass(frozen=True)
class Advisor:
    """``container`` None: the one that runs vLLM, as far as its words tell. ``length`` None: no
    advice about the length."""

    name: str
    namespace: str
    generation: int
    kind: TargetKind
    target: str
    container: str | None
    metrics: Metrics
    utilization: Bounds[float]
    length: Bounds[int] | None
    time_to_first_token: float

    @classmethod
    def parse(cls, resource: Json) -> Self:
        """Reads one MemoryAdvisor. Raises spec.InvalidSpec naming field, value and what is allowed."""
        metadata, spec = resource["metadata"], resource["spec"]
        reference, page, tuning = spec["targetRef"], spec.get("metrics", {}), spec.get("tuning", {})
        utilization, length = tuning.get("gpuMemoryUtilization", {}), tuning.get("maxModelLen")
        objectives = tuning.get("objectives", {})
        return cls(
            name=metadata["name"],
            namespace=metadata["namespace"],
            generation=metadata["generation"],
            kind=TargetKind(reference["kind"]),
            target=reference["name"],
            container=spec.get("container"),
            metrics=Metrics(
                port=page.get("port"),
                path=page.get("path", "/metrics"),
                tls=page.get("scheme", "HTTP") == "HTTPS",
                model=page.get("modelName"),
                interval=parse_duration("spec.metrics.interval", page.get("interval", "15s")),
            ),
            utilization=Bounds(utilization.get("minAllowed"), utilization.get("maxAllowed")),
            length=None
            if length is None
            else Bounds(length.get("minAllowed"), length.get("maxAllowed")),
            time_to_first_token=parse_duration(
                "spec.tuning.objectives.timeToFirstToken",
                objectives.get("timeToFirstToken", "2s"),
            ),
        )
