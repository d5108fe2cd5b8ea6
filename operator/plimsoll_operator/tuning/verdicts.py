"""The tuner's four conditions. In: what one pass found. Out: verdicts with stable messages: a figure
that moves with every page would make every pass a write."""

from __future__ import annotations

from collections.abc import Mapping

from plimsoll_operator.quantities import parse_quantity
from plimsoll_operator.spec import TuningMode
from plimsoll_operator.tuning.bounds import active_blocks
from plimsoll_operator.tuning.failures import limit_at_death
from plimsoll_operator.tuning.policy import TuningPolicy
from plimsoll_operator.tuning.values import (
    TUNED,
    EngineReading,
    FailureClass,
    Learned,
    LimitsOutcome,
    OOMRecord,
    OutcomeKind,
    Parameter,
    Settings,
    Status,
    Unknown,
    Verdict,
)

_LINE = Parameter.GPU_MEMORY_UTILIZATION
# In gRPC's words: the engine shows another certificate than the Secret holds.
_DISTRUST = "CERTIFICATE_VERIFY_FAILED"


def metrics_available(
    unknowns: tuple[Unknown, ...], engines: Mapping[str, EngineReading | Unknown]
) -> Verdict:
    if not engines:
        return Verdict("MetricsAvailable", Status.UNKNOWN, "NoEngines", "no engine serves yet")
    if not unknowns:
        return Verdict(
            "MetricsAvailable", Status.TRUE, "Fresh", "every engine's metrics are complete"
        )
    first = unknowns[0]
    message = f"pod {first.pod}: {first.message}"
    if len(unknowns) > 1:
        message += f"; also {', '.join(unknown.pod for unknown in unknowns[1:])}"
    return Verdict("MetricsAvailable", Status.FALSE, first.reason.value, message)


def tuning_active(
    settings: Settings,
    available: Verdict,
    outcomes: Mapping[str, LimitsOutcome],
    pending: tuple[str, ...],
    late: tuple[str, ...],
) -> Verdict:
    """``pending``: pods that have not taken over the limits yet; ``late``: those of them whose time
    for it is over. What no engine has confirmed is never said to be in force, in any mode."""

    def inactive(reason: str, message: str) -> Verdict:
        return Verdict("TuningActive", Status.FALSE, reason, message)

    # A pod that has them by now, from its limits file, has a refusal of an earlier life.
    refused = (o.pod for o in outcomes.values() if o.kind is OutcomeKind.REJECTED)
    rejected = sorted(pod for pod in refused if pod in pending)
    if rejected:
        reason = outcomes[rejected[0]].reason
        return inactive("LimitsRejected", f"pod {rejected[0]} refused its limits: {reason}")
    if late:
        return inactive("LimitsNotConfirmed", _explain_late(late[0], outcomes))
    if settings.mode is TuningMode.OFF:
        if available.status is Status.FALSE:
            return inactive("Off", f"spec.tuning.mode is Off; not confirmed: {available.message}")
        if pending:
            waiting = f"pod {pending[0]} has not taken over the spec's values yet"
            return inactive("Off", f"spec.tuning.mode is Off; {waiting}")
        return inactive("Off", "spec.tuning.mode is Off: the spec's values are in force")
    if settings.mode is TuningMode.HOLD:
        return inactive("Hold", "spec.tuning.mode is Hold: the values in force stay as they are")
    if available.status is not Status.TRUE:
        return inactive(available.reason, f"nothing is changed: {available.message}")
    if settings.mode is TuningMode.ADVISE:
        return inactive(
            "Advise", "spec.tuning.mode is Advise: status.tuning.target says what would be done"
        )
    if settings.mode is TuningMode.INITIAL:
        return inactive(
            "Initial", "spec.tuning.mode is Initial: limits stay where the engines started"
        )
    return Verdict("TuningActive", Status.TRUE, "Auto", "limits follow the traffic")


def _explain_late(pod: str, outcomes: Mapping[str, LimitsOutcome]) -> str:
    message = f"pod {pod} has not taken over the limits; nothing more is changed until then"
    outcome = outcomes.get(pod)
    if outcome is None or not outcome.reason:
        return message
    message = f"{message}: {outcome.reason}"
    if outcome.kind is OutcomeKind.UNAUTHENTICATED or _DISTRUST in outcome.reason:
        message += (
            "; an engine takes over a changed control Secret within a minute or two; if it does "
            "not, delete the pod: a new one starts with the present Secret"
        )
    return message


def tuning_limited(limits: tuple[str, ...], needs_restart: str | None = None) -> Verdict:
    """``needs_restart``: what would be moved, did the runtime read it while it serves."""
    if needs_restart is not None:
        return Verdict("TuningLimited", Status.TRUE, "ReadAtStart", needs_restart)
    if limits:
        return Verdict("TuningLimited", Status.TRUE, "AtBound", "; ".join(limits))
    return Verdict("TuningLimited", Status.FALSE, "WithinBounds", "no bound holds the tuner back")


def needs_restart(
    settings: Settings, learned: Learned, policy: TuningPolicy, now: float
) -> str | None:
    """A utilisation that killed an engine and stays all the same, because it is a flag."""
    line = settings.start.gpu_memory_utilization
    if line is None or settings.mode not in TUNED or settings.may_move(_LINE):
        return None
    died = [b for b in active_blocks(learned, policy, now) if b.utilization <= line]
    if not died:
        return None
    first = died[0]
    return (
        f"an engine ended by {first.failure_class} at a gpuMemoryUtilization of "
        f"{first.utilization:.2f}; this runtime reads it when it starts, and it stays what the spec "
        "says: lower spec.engine.gpuMemoryUtilization"
    )


def oom_detected(oom: OOMRecord, settings: Settings, policy: TuningPolicy, now: float) -> Verdict:
    """True for a day after the last one. Host memory has a reason of its own: no limit of the
    engine can help there."""
    last = oom.last
    if last is None:
        return Verdict("OOMDetected", Status.FALSE, "NoOOM", "no engine ran out of memory")
    if last.at is not None and now - last.at > policy.oom_shown:
        return Verdict("OOMDetected", Status.FALSE, "NoRecentOOM", "none in the last 24 hours")
    message = f"pod {last.pod}: {last.message}"
    if oom.host_memory:
        if not _was_raised(limit_at_death(last), settings.memory_limit):
            limit = settings.memory_limit or "not set"
            message += (
                f"; raise spec.resources.limits.memory ({limit}), the engine's limits cannot help"
            )
        return Verdict("OOMDetected", Status.TRUE, "HostMemoryOOM", message)
    on_host = last.failure_class is FailureClass.CGROUP_OOM
    reason = "ContainerMemoryOOM" if on_host else "DeviceMemoryOOM"
    return Verdict("OOMDetected", Status.TRUE, reason, message)


def _was_raised(before: str | None, now: str | None) -> bool:
    """False where a limit is not known."""
    then = None if before is None else parse_quantity(before)
    limit = None if now is None else parse_quantity(now)
    return then is not None and limit is not None and limit > then
