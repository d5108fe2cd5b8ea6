"""Nodes on which a GPU failed, and how pods are kept from them without touching those that serve.

In: an :class:`Observed`, its current failures, the time. Out: the nodes to avoid, what that makes of the
StatefulSet, and the pods to be made elsewhere. Pure; what is remembered is in status.avoidedNodes.

A node is avoided for a day after the last fault there, by a node affinity that the scheduler prefers: where
nothing else has room, the pod comes back and tries again. The annotation plimsoll.dev/trusted-nodes on
the LLMDeployment (names, or ``*``) ends it at once.

The affinity is in the pod template, and another template would roll every pod. So the StatefulSet gets the
strategy OnDelete, and remembers which revisions differ from its present one in the nodes alone (``alike``):
their pods count as up to date, and only the pod at fault is deleted. The next template rolls all as ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from plimsoll_operator import names
from plimsoll_operator.desired.status import timestamp
from plimsoll_operator.observed import Json, Observed, Pod, StatefulSet
from plimsoll_operator.observed import seconds as unix
from plimsoll_operator.plan import Step, StepReason
from plimsoll_operator.tuning.values import Event, Failure, FailureClass

AVOIDED_SECONDS = 86_400.0
# A fault that follows the pods over so many nodes is none of the nodes'.
MOST_AVOIDED = 3
# Revisions are few: one for each set of nodes.
MOST_ALIKE = 10


@dataclass(frozen=True)
class Placement:
    """What the StatefulSet is to carry."""

    nodes: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()


def find_avoided(observed: Observed, failures: Iterable[Failure], now: float) -> list[Json]:
    """The next status.avoidedNodes. ``failures``: of pods that do not serve now."""
    trusted = observed.resource["metadata"].get("annotations", {}).get(names.TRUSTED_NODES, "")
    all_trusted = {name.strip() for name in trusted.split(",")}

    def counts(node: str, at: float) -> bool:
        return now - at < AVOIDED_SECONDS and not {"*", node} & all_trusted

    avoided = {
        entry["node"]: entry
        for entry in observed.status.get("avoidedNodes", [])
        if counts(entry["node"], unix(entry["time"]))
    }
    placed = {pod.name: pod.node for pod in observed.pods}
    for failure in failures:
        node = placed.get(failure.pod)
        if failure.failure_class is not FailureClass.GPU_FAULT or failure.at is None:
            continue
        if node is None or not counts(node, failure.at):
            continue
        if node not in avoided and len(avoided) == MOST_AVOIDED:
            continue
        entry = {
            "node": node,
            "pod": failure.pod,
            "time": timestamp(failure.at),
            "message": failure.message,
        }
        if node not in avoided or avoided[node]["time"] < entry["time"]:
            avoided[node] = entry
    return [avoided[node] for node in sorted(avoided)]


def place(observed: Observed, step: Step, avoided: Iterable[Json], *, applied: bool) -> Placement:
    """A new template begins with the nodes of now. One that is there changes them only while no
    rollout moves, and when the controller has seen what came before."""
    nodes, statefulset = tuple(entry["node"] for entry in avoided), observed.statefulset
    if statefulset is None or not applied:
        return Placement(nodes)
    seen = statefulset.observed_generation >= statefulset.generation
    if nodes == statefulset.avoided or step.reason is not StepReason.SETTLED or not seen:
        return Placement(statefulset.avoided, statefulset.alike)
    alike = dict.fromkeys((*statefulset.alike, statefulset.update_revision))
    return Placement(nodes, tuple(alike)[-MOST_ALIKE:])


def placed(statefulset: Json, placement: Placement) -> Json:
    """The StatefulSet as it is built for every node, with the placement in it."""
    if placement == Placement():
        return statefulset
    spec, metadata = dict(statefulset["spec"]), statefulset["metadata"]
    annotations = dict(metadata.get("annotations", {}))
    if placement.nodes:
        annotations[names.AVOIDED_NODES] = ",".join(placement.nodes)
        spec["template"] = _avoiding(spec["template"], placement.nodes)
    if placement.alike:
        annotations[names.ALIKE_REVISIONS] = ",".join(placement.alike)
        spec["updateStrategy"] = {"type": "OnDelete"}
    return {**statefulset, "metadata": {**metadata, "annotations": annotations}, "spec": spec}


def _avoiding(template: Json, nodes: tuple[str, ...]) -> Json:
    affinity = template["spec"].get("affinity", {})
    of_nodes = affinity.get("nodeAffinity", {})
    field = "preferredDuringSchedulingIgnoredDuringExecution"
    # By name: the label kubernetes.io/hostname need not be it.
    elsewhere = {"key": "metadata.name", "operator": "NotIn"}
    terms = [
        {"weight": 100, "preference": {"matchFields": [{**elsewhere, "values": [node]}]}}
        for node in nodes
    ]
    of_nodes = {**of_nodes, field: [*of_nodes.get(field, ()), *terms]}
    spec = {**template["spec"], "affinity": {**affinity, "nodeAffinity": of_nodes}}
    return {**template, "spec": spec}


def as_one(statefulset: StatefulSet, pods: Iterable[Pod]) -> tuple[StatefulSet, tuple[Pod, ...]]:
    """Pods of a revision that differs in the nodes alone have the wanted one; ``made_as`` keeps theirs."""
    alike, wanted = set(statefulset.alike), statefulset.update_revision
    if statefulset.current_revision in alike:
        statefulset = replace(statefulset, current_revision=wanted)
    return statefulset, tuple(
        replace(pod, revision=wanted, made_as=pod.revision) if pod.revision in alike else pod
        for pod in pods
    )


def stranded(observed: Observed, failures: Iterable[Failure]) -> tuple[Pod, ...]:
    """Pods with a faulty GPU whose successors the template keeps from their node."""
    statefulset = observed.statefulset
    if statefulset is None or statefulset.observed_generation < statefulset.generation:
        return ()
    faulty = {each.pod for each in failures if each.failure_class is FailureClass.GPU_FAULT}
    return tuple(
        pod
        for pod in observed.pods
        if pod.name in faulty
        and pod.node in statefulset.avoided
        and pod.made_as not in (None, statefulset.update_revision)
    )


def avoidance_events(previous: Iterable[Json], avoided: Iterable[Json]) -> tuple[Event, ...]:
    before, after = ({entry["node"]: entry for entry in entries} for entries in (previous, avoided))
    begun = [
        Event(
            "NodeAvoided",
            f"node {node}: used -> avoided for {AVOIDED_SECONDS / 3600:g} h: pod {entry['pod']}: "
            f"{entry['message']}; the annotation {names.TRUSTED_NODES}: {node} ends it",
            warning=True,
        )
        for node, entry in after.items()
        if node not in before
    ]
    ended = [
        Event("NodeUsed", f"node {node}: avoided -> used") for node in before if node not in after
    ]
    return (*begun, *ended)
