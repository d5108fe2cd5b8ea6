"""One LLMDeployment as the commands show it.

In: the object as read. Out: a frozen :class:`View`. What stands in a status may be anybody's, so only
shapes look into it; what is not there is None and never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plimsoll_operator import shape
from plimsoll_operator.observed import read_status
from plimsoll_operator.shape import read_time
from plimsoll_operator.spec import Deployment, InvalidSpec
from plimsoll_operator.tuning.record import limits_from_json, read_state
from plimsoll_operator.tuning.values import Limits, TuningState

Json = dict[str, Any]

_LIMITS = shape.record(
    {
        "maxModelLen": shape.positive,
        "gpuMemoryUtilization": shape.share,
        "maxNumSeqs": shape.positive,
        "maxNumBatchedTokens": shape.positive,
        "watermark": shape.fraction,
        "longPromptTokens": shape.positive,
        "longPromptShare": shape.share,
    }
)
_SHAPE = shape.record(
    {
        "readySummary": shape.text,
        "url": shape.text,
        "load": shape.record(
            {
                "kvCacheUsagePercent": shape.integer,
                "running": shape.integer,
                "waiting": shape.integer,
                "time": shape.time,
            }
        ),
        "effective": shape.record(
            {
                "maxModelLen": shape.positive,
                "maxModelLenCeiling": shape.positive,
                "gpuMemoryUtilization": shape.share,
                "maxNumSeqs": shape.positive,
                "maxNumBatchedTokens": shape.positive,
                "source": shape.text,
            }
        ),
        "replicasDetail": shape.list_of(
            shape.record(
                {
                    "pod": shape.text,
                    "maxModelLen": shape.positive,
                    "gpuMemoryUtilization": shape.share,
                },
                required=("pod",),
            )
        ),
        "tuning": shape.record(
            {
                "target": _LIMITS,
                "lowerBound": _LIMITS,
                "upperBound": _LIMITS,
                "uncappedTarget": _LIMITS,
                "reason": shape.text,
            }
        ),
        "failures": shape.record(
            {
                "last": shape.record(
                    {
                        "time": shape.time,
                        "pod": shape.text,
                        "class": shape.text,
                        "message": shape.text,
                    },
                    required=("class",),
                )
            }
        ),
    }
)


@dataclass(frozen=True)
class Condition:
    status: str
    reason: str
    message: str
    since: float | None


@dataclass(frozen=True)
class Load:
    kv_percent: int | None = None
    running: int | None = None
    waiting: int | None = None
    at: float | None = None


@dataclass(frozen=True)
class Replica:
    """A pod whose limits differ from the others'."""

    pod: str
    max_model_len: int | None
    utilization: float | None


@dataclass(frozen=True)
class View:
    """``deployment`` None: the spec cannot be read, and ``invalid`` says why. ``current`` is what
    holds on every replica; ``answered`` whether the status is of the present spec."""

    namespace: str
    name: str
    deployment: Deployment | None
    invalid: str | None
    answered: bool
    ready: str | None
    url: str | None
    current: Limits
    ceiling: int | None
    source: str | None
    target: Limits
    lower: Limits
    upper: Limits
    uncapped: Limits
    reason: str | None
    load: Load
    replicas: tuple[Replica, ...]
    conditions: Mapping[str, Condition]
    state: TuningState
    ooms: int | None
    last_failure: Json | None
    rollout: Json


def read_view(resource: Json) -> View:
    metadata, raw = resource["metadata"], resource.get("status")
    status = _SHAPE(raw) or {}
    tuning, effective = status.get("tuning", {}), status.get("effective", {})
    load, known = status.get("load", {}), read_status(resource)
    state = read_state(known)
    deployment, invalid = _parse(resource)
    return View(
        namespace=metadata["namespace"],
        name=metadata["name"],
        deployment=deployment,
        invalid=invalid,
        answered=status.get("observedGeneration") == metadata.get("generation"),
        ready=status.get("readySummary"),
        url=status.get("url"),
        current=limits_from_json(effective),
        ceiling=effective.get("maxModelLenCeiling"),
        source=effective.get("source"),
        target=limits_from_json(tuning.get("target", {})),
        lower=limits_from_json(tuning.get("lowerBound", {})),
        upper=limits_from_json(tuning.get("upperBound", {})),
        uncapped=limits_from_json(tuning.get("uncappedTarget", {})),
        reason=tuning.get("reason"),
        load=Load(
            load.get("kvCacheUsagePercent"),
            load.get("running"),
            load.get("waiting"),
            read_time(load.get("time")),
        ),
        replicas=tuple(
            Replica(each["pod"], each.get("maxModelLen"), each.get("gpuMemoryUtilization"))
            for each in status.get("replicasDetail", ())
        ),
        conditions={
            each["type"]: Condition(
                each["status"],
                each["reason"],
                each["message"],
                read_time(each["lastTransitionTime"]),
            )
            for each in known.get("conditions", ())
        },
        state=state,
        ooms=state.oom.total if isinstance(raw, dict) and "oom" in raw else None,
        last_failure=status.get("failures", {}).get("last"),
        rollout=known.get("rollout", {}),
    )


def _parse(resource: Json) -> tuple[Deployment | None, str | None]:
    try:
        return Deployment.parse(resource), None
    except InvalidSpec as error:
        return None, str(error)
