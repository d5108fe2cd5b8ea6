"""The conditions of a MemoryAdvisor, each with its reason and message together.

In: what one pass saw and advised. Out: verdicts with stable messages. Ready answers "is the advice founded
on complete and fresh figures", and its message names the root cause first.
"""

from __future__ import annotations

from plimsoll_operator.advisor.advice import standing
from plimsoll_operator.advisor.advise import Advised
from plimsoll_operator.advisor.observed import Observed
from plimsoll_operator.tuning import verdicts
from plimsoll_operator.tuning.policy import DEFAULT_POLICY
from plimsoll_operator.tuning.values import (
    LANE,
    Failure,
    FailureClass,
    OOMRecord,
    Status,
    Unknown,
    Verdict,
)


def judge(observed: Observed, advised: Advised, now: float) -> tuple[Verdict, ...]:
    causes = (
        _target_found(observed),
        _pods_found(observed, advised),
        _metrics_available(observed, advised),
        _settings_known(observed, advised),
    )
    return (
        _ready(observed, advised, causes),
        *causes,
        _change_advised(advised),
        _oom_detected(advised.known.state.oom, observed, now),
    )


def _ready(observed: Observed, advised: Advised, causes: tuple[Verdict, ...]) -> Verdict:
    wrong = next((each for each in causes if each.status is not Status.TRUE), None)
    # Of settings only those are wanted without which there is no judgement at all.
    if wrong is not None and not (wrong.type == "SettingsKnown" and advised.decision is not None):
        return Verdict("Ready", Status.FALSE, wrong.reason, wrong.message)
    read = f"{len(observed.readings)} of {len(observed.pods)} pods are read"
    return Verdict("Ready", Status.TRUE, "Advising", read)


def _target_found(observed: Observed) -> Verdict:
    advisor, missing = observed.advisor, observed.missing
    if missing is not None:
        return Verdict("TargetFound", Status.FALSE, missing.reason, missing.message)
    found = f"{advisor.kind} {advisor.target}"
    return Verdict("TargetFound", Status.TRUE, "Found", found)


def _pods_found(observed: Observed, advised: Advised) -> Verdict:
    advisor, serving = observed.advisor, [each for each in observed.pods if each.serves]
    if observed.missing is not None:
        return Verdict("PodsFound", Status.UNKNOWN, observed.missing.reason, "no target, no pods")
    if not serving:
        message = f"{advisor.kind} {advisor.target} has no pods"
        return Verdict("PodsFound", Status.FALSE, "NoPods", message)
    if not observed.pages:
        return Verdict("PodsFound", Status.FALSE, "NoPodRuns", _why_none_runs(advised))
    return Verdict("PodsFound", Status.TRUE, "Found", f"{len(observed.pods)} pods")


def _why_none_runs(advised: Advised) -> str:
    """With the figure that would work, where vLLM has said it."""
    if not advised.failures:
        return "no pod has started yet"
    first = advised.failures[0]
    message = f"pod {first.pod}: {first.message}"
    if first.suggested_flag is None:
        return message
    return f"{message}; {first.suggested_flag}={first.suggested_value} would work"


def _metrics_available(observed: Observed, advised: Advised) -> Verdict:
    if advised.decision is not None:
        # The tuner waits for a second look before it calls a slow page missing.
        told = (each for each in advised.decision.verdicts if each.type == "MetricsAvailable")
        return next(told)
    engines = observed.engines
    unknowns = tuple(page for _, page in sorted(engines.items()) if isinstance(page, Unknown))
    return verdicts.metrics_available(unknowns, engines)


def _settings_known(observed: Observed, advised: Advised) -> Verdict:
    current, newest = advised.current, observed.newest
    if newest is None:
        return Verdict("SettingsKnown", Status.UNKNOWN, "NoPods", "there is no pod to read them of")
    unread = "".join(f"; {each}" for each in newest.flags.unread)
    missing = []
    if current.gpu_memory_utilization is None:
        missing.append("gpu-memory-utilization, without which nothing can be advised")
    if observed.advisor.length is not None and current.max_model_len is None:
        missing.append("max-model-len, without which nothing is advised about the length")
    if not missing:
        message = "every setting that the tuner needs is known"
        return Verdict("SettingsKnown", Status.TRUE, "Known", message)
    message = f"neither the words of pod {newest.name} nor its page say {' nor '.join(missing)}"
    return Verdict("SettingsKnown", Status.FALSE, "SettingUnknown", message + unread)


def _change_advised(advised: Advised) -> Verdict:
    """Of vLLM's own settings: the lane is where the tuner starts, with any engine."""
    found = [each for each in standing(advised.known.advice) if each.parameter not in LANE]
    if not found:
        message = "no setting of vLLM's would be changed"
        return Verdict("ChangeAdvised", Status.FALSE, "AsItIs", message)
    message = "; ".join(f"{each.parameter} {each.to:g} ({each.rule})" for each in found)
    return Verdict("ChangeAdvised", Status.TRUE, "SeeRecommendation", message)


def _oom_detected(oom: OOMRecord, observed: Observed, now: float) -> Verdict:
    """True for a day after the last one."""
    last = oom.last
    if last is None:
        return Verdict("OOMDetected", Status.FALSE, "NoOOM", "no container ran out of memory")
    if last.at is not None and now - last.at > DEFAULT_POLICY.oom_shown:
        return Verdict("OOMDetected", Status.FALSE, "NoRecentOOM", "none in the last 24 hours")
    message = f"pod {last.pod}: {last.message}"
    if oom.host_memory:
        message += "; raise the container's memory limit, vLLM's own limits cannot help"
        return Verdict("OOMDetected", Status.TRUE, "HostMemoryOOM", message)
    return Verdict("OOMDetected", Status.TRUE, _reason(last), message)


def _reason(last: Failure) -> str:
    on_host = last.failure_class is FailureClass.CGROUP_OOM
    return "ContainerMemoryOOM" if on_host else "DeviceMemoryOOM"
