"""What one pass saw, judged: the conditions, each with its reason and message together.

In: an :class:`Observed`, the failures found in it and what the plan made of them. Out: verdicts for
Ready, Available, Progressing, Degraded and Stalled (the tuner makes the other four). Pure; knows
neither the client nor how a condition is stored.

Ready answers "does everything that is wanted serve", Available "does anything serve": during a
rollout the first is False and the second usually True. Messages name the root cause (a pod's
failure) before its symptom (a pod that is not ready).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from plimsoll_operator import names
from plimsoll_operator.observed import Observed, Pod, Unusable
from plimsoll_operator.tuning.failures import classify
from plimsoll_operator.tuning.values import Failure, FailureClass, Status, Verdict

# Root causes first: when several pods are in trouble, the earliest class here is shown.
_PRECEDENCE = (
    FailureClass.INVALID_CONFIGURATION,
    FailureClass.MODEL_TOO_LARGE,
    FailureClass.KV_TOO_SMALL_FOR_MAX_LEN,
    FailureClass.CGROUP_OOM,
    FailureClass.CUDA_OOM_AT_START,
    FailureClass.CUDA_OOM_AT_RUNTIME,
    FailureClass.IMAGE_ERROR,
    FailureClass.MODEL_LOAD_FAILED,
    FailureClass.GPU_FAULT,
    FailureClass.GPU_BUSY_AT_START,
    FailureClass.COLLECTIVE_FAILURE,
    FailureClass.EVICTED,
    FailureClass.ENGINE_DEAD,
    FailureClass.UNSCHEDULABLE,
)

# A controller makes a missing pod within a second or two.
MISSING_SECONDS = 30.0
NOT_CREATED = "PodsNotCreated"

# By kind of another project: the field that asks for it, what installs it, and the chart's value.
_SIGS = "https://github.com/kubernetes-sigs"
_FROM_ELSEWHERE = {
    "LeaderWorkerSet": (
        "spec.parallelism.nodes",
        f"{_SIGS}/lws/releases/download/v0.8.0/manifests.yaml",
        "leaderWorkerSet",
    ),
    "InferencePool": (
        "spec.inferencePool",
        f"{_SIGS}/gateway-api-inference-extension/releases/download/v1.3.0/manifests.yaml",
        "inferencePool",
    ),
}


@dataclass(frozen=True)
class Violation:
    """Why a check does not hold."""

    reason: str
    message: str


@dataclass(frozen=True)
class View:
    """``failures`` are of pods that do not serve now; ``applied`` says that the cluster has the
    template that the spec asks for; ``stall`` is set when only the user can help; since
    ``missing_since`` the StatefulSet has had fewer pods than it should make."""

    observed: Observed
    failures: tuple[Failure, ...]
    applied: bool
    stall: Violation | None
    now: float
    missing_since: float | None = None
    # What the pods wait for before they may have the wanted template.
    waiting: Violation | None = None
    # What the rollout waits for, in words.
    rollout: str = ""
    # What else the spec asks for and is not there; the engines serve without it.
    lacking: Violation | None = None

    @property
    def wanted(self) -> int:
        return self.observed.deployment.replicas

    @property
    def rolled(self) -> tuple[Pod, ...]:
        """Pods of the wanted revision; none while the cluster has not the wanted template."""
        statefulset = self.observed.statefulset
        if statefulset is None or not self.applied:
            return ()
        if statefulset.observed_generation < statefulset.generation:
            return ()
        return tuple(
            pod
            for pod in self.observed.pods
            if pod.revision == statefulset.update_revision and not pod.deleting
        )

    @property
    def serving(self) -> tuple[Pod, ...]:
        return tuple(pod for pod in self.observed.pods if pod.ready and not pod.deleting)


def judge(view: View) -> tuple[Verdict, ...]:
    return (
        _ready(view),
        _available(view),
        _progressing(view),
        _degraded(view),
        _stalled(view),
    )


def find_failure(pod: Pod) -> Failure | None:
    """Of a group the cause, not what it did to the others: ranks that have lost one say so, and only that
    one's pod says why. Told of the pod that stands for the group."""
    found = [failure for each in (pod, *pod.members) if (failure := classify(each)) is not None]
    if not found:
        return None
    cause = min(found, key=_from_cause_to_symptom)
    if cause.pod == pod.name:
        return cause
    return replace(cause, pod=pod.name, message=f"pod {cause.pod} of its group: {cause.message}")


def _from_cause_to_symptom(failure: Failure) -> tuple[bool, int, float]:
    lost_another = failure.failure_class is FailureClass.COLLECTIVE_FAILURE
    return lost_another, _PRECEDENCE.index(failure.failure_class), failure.at or 0.0


def find_unusable(observed: Observed, kind: str) -> Violation | None:
    """Of what the spec asks for and cannot be had, how it is had."""
    why = observed.unusable.get(kind)
    if why is None:
        return None
    field, install, value = _FROM_ELSEWHERE[kind]
    if why is Unusable.FORBIDDEN:
        message = f"the operator may not make a {kind}; helm upgrade with {value}.enabled=true"
    else:
        message = (
            f"this cluster has no {kind}; install it: kubectl apply --server-side -f {install}"
        )
    return Violation(f"{kind}{why}", f"{field} is set: {message}")


def current_failures(pods: Iterable[Pod], failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Failures of pods that have not recovered, root causes first."""
    troubled = {pod.name for pod in pods if not pod.ready and not pod.deleting}
    current = (failure for failure in failures if failure.pod in troubled)
    return tuple(sorted(current, key=lambda f: (_PRECEDENCE.index(f.failure_class), f.pod)))


def complete(view: View) -> bool:
    """Every wanted replica has the wanted revision and serves, and no other pod is left."""
    ready = [pod for pod in view.rolled if pod.ready]
    return len(ready) == view.wanted == len(view.observed.pods)


def missing_since(observed: Observed, before: float | None, now: float) -> float | None:
    """Since when the StatefulSet has had fewer pods than it should make; ``before`` is what the
    pass before said. A pod that is replaced is away for a moment, which is no trouble."""
    statefulset = observed.statefulset
    if statefulset is None or len(observed.pods) >= statefulset.replicas:
        return None
    if before is not None:
        return before
    # An operator that was restarted goes on with what status says: it is not news again.
    told = any(
        condition["reason"] == NOT_CREATED for condition in observed.status.get("conditions", [])
    )
    return now - MISSING_SECONDS if told else now


def _trouble(view: View) -> Violation | None:
    if view.failures:
        first = view.failures[0]
        return Violation(first.failure_class.value, f"pod {first.pod}: {first.message}")
    return _not_created(view)


def _not_created(view: View) -> Violation | None:
    """Why is in the StatefulSet's Events, which the operator has no right to read."""
    statefulset, since = view.observed.statefulset, view.missing_since
    if statefulset is None or since is None or view.now - since < MISSING_SECONDS:
        return None
    made, deployment = len(view.observed.pods), view.observed.deployment
    who, what, look = "StatefulSet", "pods", f"sts {deployment.name}"
    if deployment.in_groups:
        who, what = "LeaderWorkerSet", "groups"
        look = f"lws,sts {names.group(deployment.name)}"
    return Violation(
        NOT_CREATED,
        f"the {who} controller makes no more than {made} of {statefulset.replicas} {what}; its "
        f"Events say why (quota, service account, priority class, a webhook): "
        f"kubectl describe {look} -n {deployment.namespace}",
    )


def _ready(view: View) -> Verdict:
    def no(violation: Violation) -> Verdict:
        return Verdict("Ready", Status.FALSE, violation.reason, violation.message)

    if view.stall is not None:
        return no(view.stall)
    if view.wanted == 0:
        return no(Violation("ScaledToZero", "spec.replicas is 0"))
    if complete(view):
        serving = f"{view.wanted} of {view.wanted} replicas serve"
        return Verdict("Ready", Status.TRUE, "Serving", serving)
    ready = sum(pod.ready for pod in view.rolled)
    counted = f"{ready} of {view.wanted} replicas serve the wanted revision"
    trouble = _trouble(view)
    if trouble is not None:
        return no(Violation(trouble.reason, f"{trouble.message}; {counted}"))
    if view.waiting is not None:
        return no(Violation(view.waiting.reason, f"{view.waiting.message}; {counted}"))
    rolling = len(view.rolled) < len(view.observed.pods)
    return no(Violation("RollingOut" if rolling else "ReplicasNotReady", counted))


def _available(view: View) -> Verdict:
    serving, rolled = view.serving, {pod.uid for pod in view.rolled}
    if not serving:
        reason = "ScaledToZero" if view.wanted == 0 else "NoReplicaServes"
        return Verdict("Available", Status.FALSE, reason, f"0 of {view.wanted} replicas serve")
    old = sum(pod.uid not in rolled for pod in serving)
    message = f"{len(serving)} of {view.wanted} replicas serve"
    if old:
        message += f", {old} of them an older revision"
    return Verdict("Available", Status.TRUE, "ReplicasServe", message)


def _progressing(view: View) -> Verdict:
    """As in a Deployment: True while a change moves and after it is complete."""
    if view.stall is not None:
        return Verdict("Progressing", Status.FALSE, view.stall.reason, view.stall.message)
    if complete(view):
        return Verdict("Progressing", Status.TRUE, "Complete", "every replica is up to date")
    if view.waiting is not None:
        return Verdict("Progressing", Status.TRUE, view.waiting.reason, view.waiting.message)
    ready = sum(pod.ready for pod in view.rolled)
    counted = f"{ready} of {view.wanted} replicas serve the wanted revision"
    deadline = view.observed.deployment.progress_deadline
    idle = view.now - progressed_at(view.observed, view.rolled)
    if idle <= deadline + view.observed.deployment.soak:
        message = f"{counted}; {view.rollout}" if view.rollout else counted
        return Verdict("Progressing", Status.TRUE, "RollingOut", message)
    trouble = _trouble(view) or _unready(view)
    message = f"no progress for more than {deadline:g} s: {trouble.message}; {counted}"
    return Verdict("Progressing", Status.FALSE, "ProgressDeadlineExceeded", message)


def progressed_at(observed: Observed, rolled: Iterable[Pod]) -> float:
    """The last step forward: a change of the spec or of what makes the pods, a pod of the wanted
    template made anew, or become ready. A group is made anew by each death, which is no step."""
    steps = [observed.changed_at]
    if observed.statefulset is not None and observed.statefulset.applied_at is not None:
        steps.append(observed.statefulset.applied_at)
    for pod in rolled:
        if not observed.deployment.in_groups:
            steps.append(pod.created_at)
        if pod.ready_since is not None:
            steps.append(pod.ready_since)
    return max(steps)


def _unready(view: View) -> Violation:
    waiting = sorted(pod.name for pod in view.observed.pods if not pod.ready)
    if waiting:
        return Violation("PodsNotReady", f"pod {waiting[0]} is not ready")
    return Violation("PodsMissing", "pods are missing")


def _degraded(view: View) -> Verdict:
    trouble = view.stall or _trouble(view) or view.lacking
    if trouble is not None:
        return Verdict("Degraded", Status.TRUE, trouble.reason, trouble.message)
    return Verdict("Degraded", Status.FALSE, "AsExpected", "no replica is in trouble")


def _stalled(view: View) -> Verdict:
    if view.stall is not None:
        return Verdict("Stalled", Status.TRUE, view.stall.reason, view.stall.message)
    return Verdict("Stalled", Status.FALSE, "AsExpected", "nothing waits for a change of the spec")


def foreign_children(observed: Observed) -> Violation | None:
    """An object that has a child's name but belongs to somebody else is never taken over."""
    for (kind, name), body in observed.children.items():
        if body is None:
            continue
        metadata = body["metadata"]
        owners = [owner for owner in metadata.get("ownerReferences", []) if owner.get("controller")]
        if owners and owners[0]["uid"] != observed.deployment.uid:
            owner = f"{owners[0]['kind']} {owners[0]['name']} (uid {owners[0]['uid']})"
            return _conflict(f"{kind} {name} belongs to {owner}")
        label = metadata.get("labels", {}).get(names.DEPLOYMENT_LABEL)
        if not owners and label != observed.deployment.name:
            mine = f"{names.DEPLOYMENT_LABEL}={observed.deployment.name}"
            return _conflict(
                f"{kind} {name} exists and is not Plimsoll's: it has neither an owner nor the label {mine}",
                f"; if it is this one's own and was stripped, kubectl label {kind.lower()} {name} {mine} "
                f"--overwrite -n {observed.deployment.namespace}",
            )
    return None


def _conflict(what: str, or_else: str = "") -> Violation:
    """With the ways out: which is right only the user knows."""
    ways = "nothing is written until it is deleted or the LLMDeployment has another name"
    return Violation("NameConflict", f"{what}; {ways}{or_else}")


def concerns(failure: Failure, observed: Observed, *, applied: bool) -> bool:
    """Whether a failure says anything about the wanted template. A failed start of a pod of an
    older one does not; running out of memory while serving is worth knowing anyway."""
    if failure.serving or failure.failure_class is FailureClass.CGROUP_OOM:
        return True
    statefulset = observed.statefulset
    if statefulset is None or not applied:
        return False
    return any(
        pod.name == failure.pod and pod.revision == statefulset.update_revision
        for pod in observed.pods
    )
