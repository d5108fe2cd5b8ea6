"""What the first pod of a new template has shown.

In: what was observed, the failures, the readings and the answer to the probe. Out: a :class:`Canary`
with its words. Pure. The probe is a prompt about as long as the engine admits, sent to that pod through
the API that clients use: what a start-up profile never saw shows here, and not under the users' load.

    pod made -> ready -> probe answered -> ready for spec.rollout.soak -> proven
                  any death that speaks against the template, a failed probe -> failed
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from plimsoll_operator.checks import Violation
from plimsoll_operator.observed import Observed, Pod, seconds
from plimsoll_operator.spec import CanaryMode
from plimsoll_operator.tuning.values import (
    OUT_OF_MEMORY,
    EngineReading,
    Failure,
    FailureClass,
    Unknown,
)

# A death of the process may have a cause of its own; the second one of the same pod is the template's.
DEATHS = 2
# A probe that failed is sent once more.
FAILED_PROBES = 2
PROBE_FAILED = "CanaryProbeFailed"
# The answer is not what is tried: the prompt is.
PROBE_OUTPUT_TOKENS = 4

# The tuner gives up failed starts by itself, after what it has tried against them. These are left.
_MAY_BE_THE_TEMPLATE = frozenset({FailureClass.ENGINE_DEAD, FailureClass.COLLECTIVE_FAILURE})


class ProbeOutcome(StrEnum):
    PASSED = "Passed"
    FAILED = "Failed"
    # The engine has no room now: it is asked again.
    BUSY = "Busy"
    # The server does not take such a request: it says nothing of the template.
    REFUSED = "Refused"


@dataclass(frozen=True)
class Probe:
    """The last answer of one pod; ``failures`` counts those that failed. ``at`` in Unix seconds."""

    pod_uid: str
    outcome: ProbeOutcome
    prompt_tokens: int
    message: str
    at: float
    failures: int = 0

    @property
    def done(self) -> bool:
        """Not to be sent again."""
        retried = self.outcome is ProbeOutcome.FAILED and self.failures < FAILED_PROBES
        return not retried and self.outcome is not ProbeOutcome.BUSY


@dataclass(frozen=True)
class Canary:
    """``probe_tokens``: the length of the prompt to send now; ``failure`` is why the template is to be given
    up; ``message`` says what is waited for, without a time that passes."""

    pod: Pod
    proven: bool
    message: str
    probe_tokens: int | None = None
    failure: Violation | None = None


def judge_canary(
    observed: Observed,
    *,
    failures: Iterable[Failure],
    readings: Mapping[str, EngineReading | Unknown],
    probe: Probe | None,
    now: float,
) -> Canary | None:
    """None while there is no pod of the wanted template. Asked only where the cluster has that template
    and not every pod has it."""
    statefulset, deployment = observed.statefulset, observed.deployment
    assert statefulset is not None
    made = [pod for pod in observed.pods if pod.revision == statefulset.update_revision]
    new = [pod for pod in made if not pod.deleting]
    # A group goes away with its death.
    tried = made if deployment.in_groups else new
    if not tried:
        return None
    dead = find_death(observed, tried, failures)
    if dead is not None:
        return Canary(max(tried, key=_ordinal), False, dead.message, failure=dead)
    if not new:
        return None
    pod = max(new, key=_ordinal)
    probe = probe if probe is not None and probe.pod_uid == pod.uid else None
    unready = [each for each in new if not each.ready]
    if unready or pod.ready_since is None:
        waited = unready[0] if unready else pod
        return Canary(pod, False, f"pod {waited.name} is not ready yet")
    told = "no prompt is sent (spec.rollout.canary)"
    if deployment.canary is CanaryMode.PROBE:
        if probe is None or not probe.done:
            length = _probe_tokens(readings.get(pod.name))
            if length is not None:
                again = "" if probe is None else f" again, after: {probe.message}"
                message = f"pod {pod.name} gets a prompt of {length} tokens{again}"
                return Canary(pod, False, message, probe_tokens=length)
            if any(isinstance(reading, EngineReading) for reading in readings.values()):
                # Others can be read: it is this pod, or the template.
                return Canary(pod, False, f"pod {pod.name} cannot be read, others can")
            told = "no engine can be read, so no prompt was sent"
        elif probe.outcome is ProbeOutcome.FAILED:
            failed = Violation(PROBE_FAILED, f"pod {pod.name}: {probe.message}")
            return Canary(pod, False, failed.message, failure=failed)
        else:
            told = probe.message
    since = max(each.ready_since or now for each in new)
    if now - since < deployment.soak:
        message = f"pod {pod.name} must stay ready for {deployment.soak:g} s; {told}"
        return Canary(pod, False, message)
    return Canary(pod, True, f"pod {pod.name} works: {told}")


def _ordinal(pod: Pod) -> int:
    return pod.ordinal


def find_death(
    observed: Observed, new: Iterable[Pod], failures: Iterable[Failure]
) -> Violation | None:
    """The death of a canary that speaks against its template. Out of memory while it served is enough
    once; a busy or broken device and what never started are somebody else's to judge."""
    pods = {pod.name: pod for pod in new}
    for failure in sorted(failures, key=lambda each: each.incident):
        pod = pods.get(failure.pod)
        if pod is None:
            continue
        kind, deaths = failure.failure_class, _deaths(observed, pod)
        served = kind in OUT_OF_MEMORY and failure.serving is True
        if served or (kind in _MAY_BE_THE_TEMPLATE and deaths >= DEATHS):
            times = f" ({deaths} times)" if deaths > 1 else ""
            return Violation(kind.value, f"pod {pod.name}: {failure.message}{times}")
    return None


def _deaths(observed: Observed, pod: Pod) -> int:
    """Of a pod that has died; of a group its pods are made anew each time, and status knows the time before."""
    if not observed.deployment.in_groups:
        return 0 if pod.container is None else max(pod.container.restarts, 1)
    statefulset, last = observed.statefulset, observed.status.get("failures", {}).get("last", {})
    assert statefulset is not None
    if last.get("pod") != pod.name or last.get("class") not in _MAY_BE_THE_TEMPLATE:
        return 1
    began = observed.changed_at if statefulset.applied_at is None else statefulset.applied_at
    return 2 if began <= seconds(last["time"]) <= pod.created_at else 1


def _probe_tokens(reading: EngineReading | Unknown | None) -> int | None:
    """The longest prompt that is admitted and fits an empty cache, with room for the answer; None while the
    pod has not told."""
    if not isinstance(reading, EngineReading):
        return None
    known = (reading.max_model_len_admitted, reading.largest_prompt_admissible)
    lengths = [length for length in known if length is not None]
    if not lengths or min(lengths) <= 2 * PROBE_OUTPUT_TOKENS:
        return None
    return min(lengths) - PROBE_OUTPUT_TOKENS
