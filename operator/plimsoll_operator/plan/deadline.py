"""When a template that works nowhere has had its time.

In: what was observed, what its canary waits for, and the failures of pods that do not serve. Out: a
:class:`Violation` with the cause, or None. Pure. Asked only where the template before has served: its
pods are what a rollout that gets no further keeps away. Not held against a template is what no template
can mend: a device that is busy or broken, a node that was taken away, and a pod more than wanted that
finds no node (nothing was given up for it).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from plimsoll_operator.checks import Violation, progressed_at
from plimsoll_operator.observed import Observed, seconds
from plimsoll_operator.plan.canary import Canary
from plimsoll_operator.tuning.values import Failure, FailureClass

OVERDUE = "ProgressDeadlineExceeded"

_NO_FAULT_OF_IT = frozenset(
    {FailureClass.GPU_BUSY_AT_START, FailureClass.GPU_FAULT, FailureClass.EVICTED}
)


def find_overdue(
    observed: Observed,
    canary: Canary | None,
    *,
    failures: Iterable[Failure],
    missing_since: float | None,
    now: float,
) -> Violation | None:
    """``canary``: None while no pod has the template; ``failures``: root causes first;
    ``missing_since``: since when there have been fewer pods than there should be."""
    statefulset, deployment = observed.statefulset, observed.deployment
    assert statefulset is not None
    if any(pod.deleting for pod in observed.pods):
        # Who goes away has its own time for that.
        return None
    if canary is not None and canary.probe_tokens is not None:
        # It serves, and its answer decides.
        return None
    new = {p.name: p for p in observed.pods if p.revision == statefulset.update_revision}
    since = progressed_at(observed, new.values())
    if not new:
        # It may only be away for a moment.
        since = max(since, now if missing_since is None else missing_since)
    if now - since <= deployment.progress_deadline + deployment.soak:
        return None
    late = f"no replica of the template worked within {deployment.progress_deadline:g} s"
    cause = _cause(observed, new, failures, since)
    if cause is None:
        waits = "no pod of it can be made" if canary is None else canary.message
        return Violation(OVERDUE, f"{waits}; {late}")
    kind, pod, message = cause
    homeless = kind == FailureClass.UNSCHEDULABLE and new[pod].ordinal >= deployment.replicas
    if kind in _NO_FAULT_OF_IT or homeless:
        return None
    return Violation(kind, f"pod {pod}: {message}; {late}")


def _cause(
    observed: Observed, new: Mapping[str, object], failures: Iterable[Failure], since: float
) -> tuple[str, str, str] | None:
    """Class, pod and message of what ails a pod of the template; by status where the pod that died of it is
    gone."""
    for failure in failures:
        if failure.pod in new:
            return failure.failure_class.value, failure.pod, failure.message
    last = observed.status.get("failures", {}).get("last", {})
    if last.get("pod") in new and seconds(last["time"]) >= since:
        return str(last.get("class", OVERDUE)), last["pod"], str(last.get("message", ""))
    return None
