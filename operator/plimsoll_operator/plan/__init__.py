"""The next step of a rollout: how many pods, from which ordinal on the new template, which pods to
replace by hand.

In: what was observed. Out: a :class:`Step` with its reason. Pure and stateless: every pass derives
its place from the cluster, so a restarted operator goes on where the last one stopped.

The StatefulSet controller does the work of a healthy rollout: from the highest ordinal down it
deletes one old pod and waits until its successor is healthy. Two things it does not do:

* A broken pod of the old template keeps its turn, though nothing is lost by replacing it at once
  and the new template is often its repair. Those pods are deleted here; with the partition at 0
  they come back with the new template.
* A new template that cannot work is tried for ever. Once that is established (and its message is
  in status) the set is cut down to the pods that still have the old template, and the partition
  keeps them there, whatever else in the spec changes:

      ordinal        0     1     2                 0     1
      before        old   old   NEW(broken)  ->   old   old        replicas 2, partition 2
      first ever    NEW(broken)              ->   (none)           replicas 0, partition 0
      scaled to 1   old   old                ->   old              replicas 1, partition 1

  Where the cause may have been cured outside the spec, one pod above the kept ones tries again at
  times (retry.py). It takes a replica that is wanted and missing, never the place of a kept pod:

      3 wanted      old   old                ->   old   old   NEW  replicas 3, partition 2
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from plimsoll_operator.observed import Observed, Pod, StatefulSet

# Waiting reasons that end only when something about the pod changes.
_BROKEN = frozenset(
    {
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)


class StepReason(StrEnum):
    SETTLED = "Settled"
    ROLLING = "Rolling"
    REPLACE_BROKEN = "ReplaceBroken"
    GIVEN_UP = "GivenUp"
    TRYING_AGAIN = "TryingAgain"


@dataclass(frozen=True)
class Step:
    """Pods below ordinal ``partition`` keep their template; ``replace`` are deleted now."""

    replicas: int
    partition: int
    reason: StepReason
    replace: tuple[Pod, ...] = ()


def next_step(observed: Observed, *, given_up: bool, try_again: bool = False) -> Step:
    """``given_up``: the template in the cluster is known not to work, and status says so;
    ``try_again``: it is time for one more start of it all the same."""
    wanted, statefulset = observed.deployment.replicas, observed.statefulset
    if statefulset is None:
        return Step(replicas=wanted, partition=0, reason=StepReason.ROLLING)
    if given_up:
        kept = min(_kept(observed.pods, statefulset), wanted)
        if try_again and kept < wanted:
            return Step(replicas=kept + 1, partition=kept, reason=StepReason.TRYING_AGAIN)
        return Step(replicas=kept, partition=kept, reason=StepReason.GIVEN_UP)
    if statefulset.current_revision == statefulset.update_revision:
        return Step(replicas=wanted, partition=0, reason=StepReason.SETTLED)
    if not _settled_view(statefulset):
        return Step(replicas=wanted, partition=0, reason=StepReason.ROLLING)
    broken = tuple(
        pod
        for pod in observed.pods
        if pod.revision != statefulset.update_revision and not pod.deleting and _is_broken(pod)
    )
    reason = StepReason.REPLACE_BROKEN if broken else StepReason.ROLLING
    return Step(replicas=wanted, partition=0, reason=reason, replace=broken)


def _settled_view(statefulset: StatefulSet) -> bool:
    """The controller has seen the template in the cluster, and may act from ordinal 0 on: before
    that a deleted pod would come back with its old template."""
    return statefulset.observed_generation >= statefulset.generation and statefulset.partition == 0


def _kept(pods: tuple[Pod, ...], statefulset: StatefulSet) -> int:
    """Length of the run of old pods from ordinal 0. Once cut down, the cluster remembers it: a
    pod that is being replaced at that moment must not shorten the run."""
    if statefulset.partition > 0 or statefulset.replicas == 0:
        return statefulset.partition
    old = {pod.ordinal for pod in pods if pod.revision != statefulset.update_revision}
    kept = 0
    while kept in old:
        kept += 1
    return kept


def _is_broken(pod: Pod) -> bool:
    if pod.unschedulable is not None or pod.phase == "Failed":
        return True
    container = pod.container
    return container is not None and (container.waiting in _BROKEN or container.ended)
