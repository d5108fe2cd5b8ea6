"""How far the prefetch of a model is, and what has to wait for it.

In: the wanted Job, the live one with its pods, and what status remembers. Out: a :class:`Prefetch`. Pure.
Pods are made, or moved to a new template, when the claim has the model; what serves meanwhile stays as it
is. A fetch that has failed is begun anew ``RETRY_SECONDS`` later, since a token, a name on the hub or a
claim may be mended outside the spec.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from plimsoll_operator import names
from plimsoll_operator.checks import Violation
from plimsoll_operator.desired.status import timestamp
from plimsoll_operator.observed import Json, seconds
from plimsoll_operator.pods import read_container, read_pod
from plimsoll_operator.tuning.failures import classify
from plimsoll_operator.tuning.values import Failure

FETCHING = "Prefetching"
FAILED = "PrefetchFailed"
RETRY_SECONDS = 600.0


@dataclass(frozen=True)
class Prefetch:
    """``job``: the child that should exist (None: none). ``waiting``: why no pod may have the wanted
    template yet; ``failed``: why the last try ended. ``completed`` names the fetch that is done."""

    job: Json | None = None
    waiting: Violation | None = None
    failed: Violation | None = None
    completed: str | None = None
    name: str | None = None

    @property
    def recorded(self) -> Json:
        """For status: which Job there may be, to be deleted when none is asked for; and which fetch is
        done: a Job that is gone, by hand or by a TTL, is not run again for what is there."""
        return {"prefetch": {"job": self.name, "completed": self.completed}} if self.name else {}

    @property
    def holds(self) -> bool:
        return self.waiting is not None or self.failed is not None


def judge_prefetch(
    wanted: Json | None, live: Json | None, pods: Iterable[Json], status: Json, now: float
) -> Prefetch:
    """``pods`` are the live Job's."""
    if wanted is None:
        return Prefetch()
    found = _judge(wanted, live, pods, now)
    if found.completed is None and (done := status.get("prefetch", {}).get("completed")):
        # Of another model: it says nothing about this one, and is kept until this one is there.
        found = (
            replace(found, completed=done) if done != _hash(wanted) else Prefetch(completed=done)
        )
    return replace(found, name=wanted["metadata"]["name"])


def _judge(wanted: Json, live: Json | None, pods: Iterable[Json], now: float) -> Prefetch:
    if live is None or _hash(live) != _hash(wanted):
        # A Job of another model, or of another image, cannot be changed: it goes first.
        return Prefetch(job=wanted if live is None else None, waiting=_waiting(wanted))
    conditions = {c["type"]: c for c in live.get("status", {}).get("conditions") or ()}
    if conditions.get("Complete", {}).get("status") == "True":
        return Prefetch(job=wanted, completed=_hash(wanted))
    cause = _cause(pods)
    if conditions.get("Failed", {}).get("status") == "True":
        again = seconds(conditions["Failed"]["lastTransitionTime"]) + RETRY_SECONDS
        what = cause.message if cause else conditions["Failed"].get("message", "it failed")
        failed = Violation(
            FAILED, f"Job {wanted['metadata']['name']}: {what}; tried again at {timestamp(again)}"
        )
        return Prefetch(job=None if again <= now else wanted, failed=failed)
    return Prefetch(job=wanted, waiting=_waiting(wanted, cause))


def _waiting(wanted: Json, cause: Failure | None = None) -> Violation:
    job = wanted["metadata"]["name"]
    if cause is not None:
        return Violation(FETCHING, f"Job {job} is at work, after {cause.message}")
    return Violation(FETCHING, f"Job {job} fetches the model; pods with it are made afterwards")


def _cause(pods: Iterable[Json]) -> Failure | None:
    """The last thing that went wrong with a pod of the Job."""
    found = []
    for body in sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"])):
        container = read_container(body, names.PREFETCH_CONTAINER)
        failure = classify(replace(read_pod(body, 0), container=container))
        if failure is not None:
            found.append(failure)
    return found[-1] if found else None


def _hash(job: Json) -> str | None:
    annotations: Json = job["metadata"].get("annotations", {})
    return annotations.get(names.TEMPLATE_ANNOTATION)
