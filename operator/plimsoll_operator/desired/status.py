"""The status of an LLMDeployment, and whether it is time to write it.

In: what was observed, judged and decided, and the status as last written. Out: the whole next
status as a plain object. Pure: everything that must survive a restart of the operator is carried
over from the previous status. What stands there may be anybody's, so only observed.read_status and
shapes look into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from plimsoll_operator import names
from plimsoll_operator.checks import View, complete
from plimsoll_operator.desired.metadata import serving_labels
from plimsoll_operator.observed import read_status
from plimsoll_operator.shape import read_time
from plimsoll_operator.tuning.values import (
    EngineReading,
    Failure,
    Limits,
    Source,
    Status,
    Unknown,
    Verdict,
)

Json = dict[str, Any]

# What only follows the traffic is written at most this often.
METRICS_INTERVAL_SECONDS = 30.0
LONGEST_MESSAGE = 1024
BLOCKED_KEPT = 10

# Parts that only follow the traffic: alone they are no reason for a write at once.
_VOLATILE = ("load", "replicasDetail", "traffic")
_VOLATILE_WITHIN = {
    "tuning": ("target", "lowerBound", "upperBound", "uncappedTarget", "reason"),
    "recommendation": ("saves",),
}


@dataclass(frozen=True)
class Report:
    """What one pass found out. ``recorded`` are the parts that the tuner keeps of its own state
    (tuning, oom); ``source`` is None while some engine has not taken over ``limits``; ``failures`` is every failure seen, ``given_up`` whether the template in the
    cluster was found not to work."""

    view: View
    verdicts: tuple[Verdict, ...]
    failures: tuple[Failure, ...]
    engines: Mapping[str, EngineReading | Unknown]
    limits: Limits
    source: Source | None
    recorded: Json
    given_up: bool
    rollout: Json = field(default_factory=dict)


def build_status(report: Report) -> Json:
    """Every part is left out when it is empty or unknown."""
    view, observed = report.view, report.view.observed
    deployment, previous = observed.deployment, observed.status
    serving = len(view.serving)
    return pruned(
        {
            "observedGeneration": deployment.generation,
            "url": names.url(deployment.name, deployment.namespace),
            "selector": names.label_selector(serving_labels(deployment)),
            "replicas": len(observed.pods),
            "readyReplicas": serving,
            "updatedReplicas": len(view.rolled),
            "readySummary": f"{serving}/{deployment.replicas}",
            "resolvedRevision": _commit(deployment.model.revision),
            "conditions": build_conditions(
                previous, deployment.generation, report.verdicts, view.now
            ),
            "effective": _effective(report),
            "replicasDetail": _replicas_detail(report),
            "failures": {"last": last_failure(previous, report.failures)},
            "revision": _revision(report),
            "rollout": report.rollout,
            "load": _load(report),
            # By it the pool is looked for, and removed, when the spec asks for none any more.
            "inferencePool": deployment.name if deployment.endpoint_picker else None,
            **report.recorded,
        }
    )


def build_invalid_status(resource: Json, message: str, now: float) -> Json:
    """For a spec that cannot be read: what was known before, and the two conditions that say so."""
    previous = read_status(resource)
    generation = resource["metadata"]["generation"]
    verdicts = (
        Verdict("Ready", Status.FALSE, "InvalidSpec", message),
        Verdict("Stalled", Status.TRUE, "InvalidSpec", message),
    )
    conditions = build_conditions(previous, generation, verdicts, now)
    return {**previous, "observedGeneration": generation, "conditions": conditions}


def build_failed_status(resource: Json, error: Exception, now: float) -> Json:
    """For a pass that an exception ended: what was known before, and that it may hold no more."""
    previous = read_status(resource)
    message = (
        f"{type(error).__name__}: {error}; nothing is managed until a pass succeeds (it is tried "
        "again by itself; the operator's log has the details)"
    )
    verdicts = (
        Verdict("Ready", Status.UNKNOWN, "ReconcileFailed", message),
        Verdict("Degraded", Status.TRUE, "ReconcileFailed", message),
    )
    told = build_conditions(previous, resource["metadata"]["generation"], verdicts, now)
    # In the order they have: the server keeps it, and another order would be another status.
    conditions = {each["type"]: each for each in (*previous.get("conditions", ()), *told)}
    return {**previous, "conditions": list(conditions.values())}


def build_conditions(
    previous: Json, generation: int, verdicts: tuple[Verdict, ...], now: float
) -> list[Json]:
    """lastTransitionTime moves when the status of a condition does, not with its message."""
    before = {condition["type"]: condition for condition in previous.get("conditions", [])}
    conditions = []
    for verdict in verdicts:
        last = before.get(verdict.type, {})
        same = last.get("status") == verdict.status.value
        conditions.append(
            {
                "type": verdict.type,
                "status": verdict.status.value,
                "reason": verdict.reason,
                "message": _cut(verdict.message),
                "observedGeneration": generation,
                "lastTransitionTime": last["lastTransitionTime"] if same else timestamp(now),
            }
        )
    return conditions


def is_due(previous: Json, status: Json, now: float) -> bool:
    """At once when something happened; when only figures moved, METRICS_INTERVAL_SECONDS after
    the last write; never when nothing differs."""
    before, after = pruned(previous), pruned(status)
    if _undated(before) == _undated(after):
        return False
    if _steady(before) != _steady(after):
        return True
    written = read_time(_part(before, "load").get("time"))
    return written is None or now - written >= METRICS_INTERVAL_SECONDS


def with_emptied_lists(status: Json, previous: Json) -> Json:
    """``status`` with an empty list for each that it no longer has: what is left out of a server-side
    apply goes only when nobody else owns it too."""
    emptied: Json = {}
    for key, part in previous.items():
        if isinstance(part, list) and part and key not in status:
            emptied[key] = []
        elif isinstance(part, dict) and isinstance(status.get(key, {}), dict):
            inner = with_emptied_lists(status.get(key, {}), part)
            if inner:
                emptied[key] = inner
    return {**status, **emptied}


def timestamp(seconds: float) -> str:
    """RFC 3339 in whole seconds, as the API server writes it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def pruned(value: Json) -> Json:
    """Without empty and unknown parts, at any depth: what is absent reads back as absent."""
    kept: Json = {}
    for key, part in value.items():
        if isinstance(part, dict):
            part = pruned(part)
        if part is not None and part != {} and part != []:
            kept[key] = part
    return kept


def _undated(status: Json) -> Json:
    load = {key: value for key, value in _part(status, "load").items() if key != "time"}
    return {**status, "load": load}


def _steady(status: Json) -> Json:
    """The status without what only follows the traffic."""
    steady = {key: value for key, value in status.items() if key not in _VOLATILE}
    conditions = status.get("conditions")
    steady["conditions"] = [
        {key: value for key, value in condition.items() if key != "message"}
        if isinstance(condition, dict)
        else condition
        for condition in (conditions if isinstance(conditions, list) else ())
    ]
    for name, volatile in _VOLATILE_WITHIN.items():
        part = _part(status, name)
        steady[name] = {key: value for key, value in part.items() if key not in volatile}
    return steady


def _part(status: Json, name: str) -> Json:
    part = status.get(name)
    return part if isinstance(part, dict) else {}


def _commit(revision: str | None) -> str | None:
    """A branch or tag resolves only in the engine; a commit is its own resolution."""
    is_commit = revision is not None and len(revision) == 40 and revision.isalnum()
    return revision if is_commit else None


def _readings(report: Report) -> list[EngineReading]:
    return [reading for reading in report.engines.values() if isinstance(reading, EngineReading)]


def _effective(report: Report) -> Json:
    """What holds on every replica; the strictest where they differ. While no engine can be read, or
    one has still to take over the limits, the last known stays: unknown is not zero."""
    previous = report.view.observed.status.get("effective", {})
    readings, engine = _readings(report), report.view.observed.deployment.engine
    admitted = [r.max_model_len_admitted for r in readings if r.max_model_len_admitted is not None]
    ceilings = [r.max_model_len_ceiling for r in readings if r.max_model_len_ceiling is not None]
    used = [r.gpu_memory_utilization for r in readings if r.gpu_memory_utilization is not None]
    limits, source = report.limits, report.source
    # Without any engine the next one starts with the limits; with one, they are only wanted.
    unknown = bool(report.engines) and not readings
    known = previous if unknown else {}
    return {
        "maxModelLen": min(
            admitted,
            default=known.get("maxModelLen") or limits.max_model_len or previous.get("maxModelLen"),
        ),
        "maxModelLenCeiling": min(
            ceilings,
            default=report.view.observed.deployment.ceiling or previous.get("maxModelLenCeiling"),
        ),
        "gpuMemoryUtilization": min(
            used,
            default=known.get("gpuMemoryUtilization")
            or limits.gpu_memory_utilization
            or engine.gpu_memory_utilization,
        ),
        "maxNumSeqs": limits.max_num_seqs or engine.max_num_seqs,
        "maxNumBatchedTokens": limits.max_num_batched_tokens or engine.max_num_batched_tokens,
        "source": previous.get("source") if source is None or unknown else source.value,
    }


def _replicas_detail(report: Report) -> list[Json]:
    """Only where the replicas differ."""
    details = [
        (reading.max_model_len_admitted, reading.gpu_memory_utilization)
        for reading in _readings(report)
    ]
    if len(set(details)) < 2:
        return []
    return [
        pruned({"pod": reading.pod, "maxModelLen": length, "gpuMemoryUtilization": utilization})
        for reading, (length, utilization) in zip(_readings(report), details, strict=True)
    ]


def last_failure(status: Json, failures: Iterable[Failure]) -> Json | None:
    """The latest of what ``status`` has, as it was last written, and of ``failures``."""
    previous: Json | None = status.get("failures", {}).get("last")
    dated = [failure for failure in failures if failure.at is not None]
    if not dated:
        return previous
    latest = max(dated, key=lambda failure: (failure.at or 0.0, failure.pod))
    time = timestamp(latest.at or 0.0)
    if previous is not None and previous["time"] > time:
        return previous
    return pruned(
        {
            "time": time,
            "pod": latest.pod,
            "class": latest.failure_class.value,
            "message": _cut(latest.message),
            "exitCode": latest.exit_code,
        }
    )


def _revision(report: Report) -> Json:
    view, observed = report.view, report.view.observed
    previous, statefulset = observed.status.get("revision", {}), observed.statefulset
    if statefulset is None:
        return dict(previous)
    updated, good = statefulset.update_revision, previous.get("lastKnownGood")
    if good in statefulset.alike:
        good = updated
    # What somebody else has put there may serve, and is not what is wanted.
    if complete(view) and view.wanted > 0 and not statefulset.foreign:
        good = updated
    blocked = [name for name in previous.get("blocked", []) if name != updated]
    was_blocked = updated in previous.get("blocked", [])
    # What serves at last, because its cause was cured outside the spec, is not blocked any more; nor what
    # was scaled to 0.
    if updated != good and view.wanted > 0 and (report.given_up or was_blocked):
        blocked.append(updated)
    return {
        "current": statefulset.current_revision or None,
        "updated": statefulset.update_revision or None,
        "lastKnownGood": good,
        "blocked": blocked[-BLOCKED_KEPT:],
    }


def _load(report: Report) -> Json | None:
    readings = _readings(report)
    if not readings:
        return None
    return {
        "kvCacheUsagePercent": round(100 * max(reading.kv_cache_usage for reading in readings)),
        "running": sum(reading.running for reading in readings),
        "waiting": sum(reading.waiting for reading in readings),
        "time": timestamp(report.view.now),
    }


def _cut(message: str) -> str:
    return message if len(message) <= LONGEST_MESSAGE else message[: LONGEST_MESSAGE - 3] + "..."
