"""The next step of a rollout: how many pods, from which ordinal on the new template, which pods to
replace by hand.

In: what was observed and what the canary has shown (canary.py). Out: a :class:`Step` with its reason.
Pure and stateless: every pass derives its place from the cluster, so a restarted operator goes on
where the last one stopped.

The StatefulSet controller does the work of a healthy rollout: from the highest ordinal down to the
partition it deletes one old pod and waits until its successor is healthy. What it does not do is
done here:

* **Canary.** One replica first; the partition keeps the others until it has proved itself.

      ordinal          0     1     2    (3)                0     1     2    (3)
      delete first    old   old   NEW              or     old   old   old   NEW   surge
      proven          old   NEW   NEW    one by one, and in the end the surged pod goes

* **Broken old pods.** Nothing is lost by replacing them at once, and the new template is often
  their repair. They are deleted here. Below the partition they would come back with the old template,
  so the strategy is OnDelete until they are back; such a pod is a canary too.

* **Rollback.** A template that cannot work, or whose canary failed, is given up: the partition is put
  above every pod, and the pods of that template are deleted and come back as they were before.

      old   old   NEW(failed)   ->   old   old   old        replicas 3, partition 3

  Where the template before never served, there is nothing to go back to: the set is cut down to the pods
  that have it (none, for the first template ever), and the partition keeps them there. Where the
  cause may have been cured outside the spec, one pod above the kept ones tries again at times
  (retry.py). It takes a replica that is wanted and missing, never the place of a kept pod.

      first ever    NEW(broken)              ->   (none)           replicas 0, partition 0
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from plimsoll_operator.observed import Observed, Pod, StatefulSet
from plimsoll_operator.spec import CanaryMode, RolloutType

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
    CANARY = "Canary"
    ROLLING = "Rolling"
    REPLACE_BROKEN = "ReplaceBroken"
    ROLLED_BACK = "RolledBack"
    GIVEN_UP = "GivenUp"
    TRYING_AGAIN = "TryingAgain"


@dataclass(frozen=True)
class Step:
    """Pods below ordinal ``partition`` keep their template; ``replace`` are deleted now. ``on_delete``:
    the controller replaces none by itself, and what is deleted comes back with the new template."""

    replicas: int
    partition: int
    reason: StepReason
    replace: tuple[Pod, ...] = ()
    on_delete: bool = False


def next_step(
    observed: Observed,
    *,
    given_up: bool,
    try_again: bool = False,
    applied: bool = True,
    proven: bool = False,
    spare: bool = False,
) -> Step:
    """``applied``: the cluster has the wanted template; ``given_up``: that one is known not to work,
    and status says so; ``try_again``: it is time for one more start of it all the same; ``proven``:
    its canary has shown that it works; ``spare``: one more replica fits beside those that are
    there (asked for when a rollout begins)."""
    wanted, statefulset = observed.deployment.replicas, observed.statefulset
    if statefulset is None:
        return Step(replicas=wanted, partition=0, reason=StepReason.ROLLING)
    if given_up and applied:
        if can_roll_back(observed):
            return _roll_back(observed, statefulset)
        kept = min(_kept(observed.pods, statefulset), wanted)
        if try_again and kept < wanted:
            return Step(replicas=kept + 1, partition=kept, reason=StepReason.TRYING_AGAIN)
        return Step(replicas=kept, partition=kept, reason=StepReason.GIVEN_UP)
    if not applied:
        return _begin(observed, spare)
    if statefulset.current_revision == statefulset.update_revision:
        return Step(replicas=wanted, partition=0, reason=StepReason.SETTLED)
    limit = wanted + _surged(observed, statefulset)
    if statefulset.foreign or not _is_seen(statefulset):
        # Nobody can tell whose template the controller is at: nothing moves before that is put right.
        return Step(
            replicas=limit,
            partition=statefulset.partition,
            reason=StepReason.CANARY if statefulset.partition else StepReason.ROLLING,
            on_delete=statefulset.on_delete,
        )
    old = [pod for pod in observed.pods if pod.revision != statefulset.update_revision]
    if proven or not _wants_canary(observed, old, limit):
        return _roll(statefulset, old, limit)
    return _hold_canary(observed, statefulset, old, limit)


def can_roll_back(observed: Observed) -> bool:
    """The pods' template before this one has served, and the StatefulSet still makes pods with it."""
    statefulset = observed.statefulset
    if statefulset is None or statefulset.current_revision == statefulset.update_revision:
        return False
    before = statefulset.current_revision
    return observed.status.get("revision", {}).get("lastKnownGood") == before or any(
        pod.ready and pod.revision == before for pod in observed.pods
    )


def _begin(observed: Observed, spare: bool) -> Step:
    """The step that goes with a new template: from then on every pod is an old one."""
    wanted, kind = observed.deployment.replicas, observed.deployment.rollout_type
    surge = kind is RolloutType.SURGE_FIRST or (kind is RolloutType.AUTO and spare)
    limit = wanted + (surge and wanted > 0)
    if not _wants_canary(observed, observed.pods, limit):
        return Step(replicas=limit, partition=0, reason=StepReason.ROLLING)
    return Step(replicas=limit, partition=limit - 1, reason=StepReason.CANARY)


def _wants_canary(observed: Observed, old: Iterable[Pod], limit: int) -> bool:
    """Where an old pod that may serve would stay beside the canary: a canary protects those."""
    if observed.deployment.canary is CanaryMode.OFF or limit < 2:
        return False
    return any(pod.ordinal < limit - 1 and not pod.deleting and not is_broken(pod) for pod in old)


def _surged(observed: Observed, statefulset: StatefulSet) -> int:
    """One above the count in a rollout that began so. Where only the scheduler knew that it does not
    fit, Auto goes on without; SurgeFirst waits, and gives no capacity away."""
    wanted = observed.deployment.replicas
    if statefulset.replicas <= wanted or wanted == 0:
        return 0
    homeless = any(p.ordinal >= wanted and p.unschedulable is not None for p in observed.pods)
    return 0 if homeless and observed.deployment.rollout_type is RolloutType.AUTO else 1


def _hold_canary(
    observed: Observed, statefulset: StatefulSet, old: Iterable[Pod], limit: int
) -> Step:
    """No further pod gets the new template, other than in the place of broken ones."""
    new = {pod.ordinal for pod in observed.pods if pod.revision == statefulset.update_revision}
    # Pods that are made meanwhile, for a larger count, are made below the partition: as the old ones.
    partition = limit if new else limit - 1
    while partition - 1 in new:
        partition -= 1
    broken = tuple(p for p in old if p.ordinal < partition and not p.deleting and is_broken(p))
    there = {pod.ordinal for pod in observed.pods if not pod.deleting}
    away = any(ordinal not in there for ordinal in range(partition))
    if broken or (statefulset.on_delete and away):
        seen = statefulset.on_delete and _is_seen(statefulset)
        return Step(
            replicas=limit,
            partition=partition,
            reason=StepReason.REPLACE_BROKEN,
            replace=broken if seen else (),
            on_delete=True,
        )
    return Step(replicas=limit, partition=partition, reason=StepReason.CANARY)


def _roll(statefulset: StatefulSet, old: Iterable[Pod], limit: int) -> Step:
    """All of them, the broken ones at once. Not while a partition protects them: a deleted pod would come
    back with its old template."""
    if statefulset.partition > 0 or statefulset.on_delete:
        return Step(replicas=limit, partition=0, reason=StepReason.ROLLING)
    broken = tuple(pod for pod in old if not pod.deleting and is_broken(pod))
    reason = StepReason.REPLACE_BROKEN if broken else StepReason.ROLLING
    return Step(replicas=limit, partition=0, reason=reason, replace=broken)


def _roll_back(observed: Observed, statefulset: StatefulSet) -> Step:
    """Pods of the template go once the partition stands that makes their successors old ones."""
    wanted = observed.deployment.replicas
    failed = tuple(
        pod
        for pod in observed.pods
        if pod.revision == statefulset.update_revision and pod.ordinal < wanted and not pod.deleting
    )
    safe = _is_seen(statefulset) and not statefulset.on_delete and statefulset.partition >= wanted
    return Step(
        replicas=wanted,
        partition=wanted,
        reason=StepReason.ROLLED_BACK,
        replace=failed if safe else (),
    )


def _is_seen(statefulset: StatefulSet) -> bool:
    """The controller has seen the StatefulSet as it is."""
    return statefulset.observed_generation >= statefulset.generation


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


def is_broken(pod: Pod) -> bool:
    """It, or a member of its group, gets no further by itself."""
    if any(is_broken(member) for member in pod.members):
        return True
    if pod.unschedulable is not None or pod.phase == "Failed":
        return True
    container = pod.container
    return container is not None and (container.waiting in _BROKEN or container.ended)
