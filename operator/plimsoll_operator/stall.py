"""What only the user can change: why, how it is remembered, and when it is tried again all the same.

In: an :class:`Observed`, the failures and what the tuner gave up. Out: a :class:`Violation` to be
shown, or None. Pure. What must outlast the failed pods is read back from status: the blocked
revision, the Stalled condition with its cause, and the last death.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from plimsoll_operator.checks import Violation
from plimsoll_operator.desired.status import timestamp
from plimsoll_operator.observed import Json, Observed
from plimsoll_operator.plan import can_roll_back, retry
from plimsoll_operator.plan.canary import PROBE_FAILED
from plimsoll_operator.plan.deadline import OVERDUE
from plimsoll_operator.spec import CanaryMode
from plimsoll_operator.tuning.values import Failure, FailureClass, Status

# What follows in a message is about the next try and no part of the cause.
_TRIED_AGAIN = "; tried again "
_ROLLED_BACK = "; rolled back to "


def find_stall(
    observed: Observed,
    *,
    applied: bool,
    refusals: tuple[Violation, ...],
    give_up: Violation | None,
) -> Violation | None:
    """``give_up``: restarting will not help the wanted revision, by what this pass saw."""
    if refusals:
        return refusals[0]
    if observed.deployment.replicas == 0:
        return None
    recorded = recorded_give_up(observed, applied=applied)
    found = give_up if applied and may_give_up(observed) else None
    # A try that failed for another reason is news; for the same one it is not.
    if recorded is not None and (found is None or found.reason == recorded.reason):
        return recorded
    return found


def recorded_give_up(observed: Observed, *, applied: bool) -> Violation | None:
    """Why the revision in the cluster is blocked, by status: the failed pods, and the evidence
    with them, may be gone by now. Only another template ends it, or this one when it serves; or a count
    of 0, after which nothing is left that a try could harm."""
    statefulset = observed.statefulset
    if statefulset is None or not applied or _has_worked(observed):
        return None
    if observed.deployment.replicas == 0:
        return None
    if statefulset.update_revision not in observed.status.get("revision", {}).get("blocked", []):
        return None
    stalled = _stalled(observed)
    if stalled is None:
        return None
    if stalled["reason"] in (*FailureClass, PROBE_FAILED, OVERDUE):
        cause = stalled["message"].partition(_TRIED_AGAIN)[0].partition(_ROLLED_BACK)[0]
        return Violation(stalled["reason"], cause)
    # A refusal, or a spec that could not be read, stood there meanwhile. It lifts no block.
    last = observed.status.get("failures", {}).get("last", {})
    return Violation(
        str(last.get("class", "RevisionBlocked")),
        f"pod {last.get('pod')}: {last.get('message')}"
        if last
        else f"revision {statefulset.update_revision} was found not to work",
    )


def may_give_up(observed: Observed) -> bool:
    """Not on a template that has worked before, nor on one that works in some pod: then the
    template is not what is broken. A canary works when it has been proven."""
    statefulset = observed.statefulset
    if statefulset is None or statefulset.observed_generation < statefulset.generation:
        return False
    return not _has_worked(observed)


def _has_worked(observed: Observed) -> bool:
    statefulset = observed.statefulset
    assert statefulset is not None
    good = observed.status.get("revision", {}).get("lastKnownGood")
    if good == statefulset.update_revision:
        return True
    if observed.deployment.canary is not CanaryMode.OFF and can_roll_back(observed):
        return is_proven(observed)
    return any(pod.ready and pod.revision == statefulset.update_revision for pod in observed.pods)


def is_proven(observed: Observed) -> bool:
    """The template in the cluster was found to work, by status: its canary, or every replica before."""
    statefulset, status = observed.statefulset, observed.status
    known = (
        status.get("rollout", {}).get("proven"),
        status.get("revision", {}).get("lastKnownGood"),
    )
    return statefulset is not None and statefulset.update_revision in known


def next_try(
    observed: Observed, stall: Violation | None, failures: Iterable[Failure], now: float
) -> float | None:
    """When the blocked template gets one more start; a time that has passed means that the try is
    due or runs. None: not without another template, and not in the place of a pod that serves."""
    if stall is None or can_roll_back(observed):
        return None
    stalled, last = _stalled(observed), observed.status.get("failures", {}).get("last")
    deaths = [failure.at for failure in failures if failure.at is not None]
    if last is not None:
        deaths.append(_seconds(last["time"]))
    return retry.next_try(
        stall.reason,
        stalled_at=now if stalled is None else _seconds(stalled["lastTransitionTime"]),
        died_at=max(deaths, default=0.0),
    )


def is_rolling(observed: Observed) -> bool:
    """The controller has seen the template, and not every pod has had it."""
    statefulset = observed.statefulset
    return (
        statefulset is not None
        and observed.deployment.canary is not CanaryMode.OFF
        and statefulset.observed_generation >= statefulset.generation
        and statefulset.current_revision != statefulset.update_revision
    )


def tell(
    stalled: Violation,
    observed: Observed,
    failures: Iterable[Failure],
    *,
    refused: bool,
    partition: int,
    now: float,
) -> Violation:
    """The stall with what becomes of it by itself; ``refused``: it is the server that says no."""
    statefulset = observed.statefulset
    if statefulset is not None and not refused and can_roll_back(observed):
        return explain_rollback(stalled, statefulset.current_revision)
    return explain(
        stalled,
        try_at=next_try(observed, stalled, failures, now),
        room=partition < observed.deployment.replicas,
        now=now,
    )


def explain_rollback(stall: Violation, revision: str) -> Violation:
    """The stall with what was done about it."""
    note = f"{_ROLLED_BACK}{revision} until the pod template is changed"
    return replace(stall, message=f"{stall.message}{note}")


def explain(stall: Violation, *, try_at: float | None, room: bool, now: float) -> Violation:
    """The stall with what becomes of it by itself. ``room``: a wanted replica is missing, so that
    a try costs no pod that serves. The text changes when a try begins or ends, not with ``now``."""
    if try_at is None:
        return stall
    if not room:
        note = "when spec.replicas leaves room beside the pods that are kept"
    elif now < try_at:
        note = f"at {timestamp(try_at)}, or at once with any change of spec.podTemplate"
    else:
        note = f"since {timestamp(try_at)}"
    return replace(stall, message=f"{stall.message}{_TRIED_AGAIN}{note}")


def _stalled(observed: Observed) -> Json | None:
    """The condition as last written, if it holds."""
    for condition in observed.status.get("conditions", []):
        if condition["type"] == "Stalled" and condition["status"] == Status.TRUE:
            found: Json = condition
            return found
    return None


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()
