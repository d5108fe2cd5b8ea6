"""Reads an advisor's target, its pods and their pages into an :class:`Observed`.

In: the cluster. Out: frozen values; nothing is written and nothing is judged here.
"""

from __future__ import annotations

from dataclasses import replace

from plimsoll_operator import cluster as api
from plimsoll_operator.advisor.flags import read_flags
from plimsoll_operator.advisor.observed import AdvisedPod, Json, Observed
from plimsoll_operator.advisor.pages import Pages
from plimsoll_operator.advisor.spec import Advisor, TargetKind
from plimsoll_operator.advisor.target import (
    RESOURCES,
    belongs,
    find_container,
    pod_selector,
    serves,
    uses_device,
)
from plimsoll_operator.checks import Violation
from plimsoll_operator.cluster import ApiError, Cluster
from plimsoll_operator.pods import read_container, read_pod


async def observe(cluster: Cluster, pages: Pages, resource: Json) -> Observed:
    """``resource`` is the MemoryAdvisor just read. Raises spec.InvalidSpec."""
    advisor = Advisor.parse(resource)
    target = await _find_target(cluster, advisor)
    if isinstance(target, Violation):
        return Observed(advisor, resource, target, (), {})
    selector = pod_selector(advisor.kind, target)
    bodies = await cluster.find(api.POD, advisor.namespace, selector)
    own = [body for body in bodies if belongs(body, advisor.kind, target)]
    own.sort(key=lambda body: str(body["metadata"]["name"]))
    pods = tuple(read_advised(body, index, advisor) for index, body in enumerate(own))
    asked = [each for each in pods if each.serves and _runs(each)]
    return Observed(advisor, resource, None, pods, await pages.read(advisor, asked))


async def _find_target(cluster: Cluster, advisor: Advisor) -> Json | Violation:
    kind, name = advisor.kind, advisor.target
    try:
        target = await cluster.get(RESOURCES[kind], advisor.namespace, name)
    except ApiError as error:
        if error.status != 403:
            raise
        return Violation("Forbidden", f"the operator may not read {kind} {name}: {error}")
    if target is not None:
        return target
    message = f"there is no {kind} {name} in namespace {advisor.namespace}"
    if kind is TargetKind.LEADER_WORKER_SET:
        message += ", or the cluster has no LeaderWorkerSets"
    return Violation("NotFound", message)


def read_advised(body: Json, index: int, advisor: Advisor) -> AdvisedPod:
    """``index``: its place among the target's pods by name, since a Deployment's have no ordinal."""
    container = find_container(body, advisor.container)
    # A container of the gate's name would be somebody else's.
    pod = replace(read_pod(body, ordinal=index), gate=None)
    if container is None:
        return AdvisedPod(
            replace(pod, container=None),
            read_flags({}),
            serves(body, advisor.kind),
            uses_device=False,
            no_container=True,
        )
    ports = container.get("ports", ())
    return AdvisedPod(
        pod=replace(pod, container=read_container(body, container["name"])),
        flags=read_flags(container),
        serves=serves(body, advisor.kind),
        uses_device=uses_device(container),
        ports=tuple((each["name"], each["containerPort"]) for each in ports if "name" in each),
    )


def _runs(each: AdvisedPod) -> bool:
    if each.no_container:
        return not each.pod.deleting
    container = each.pod.container
    return container is not None and container.started and not each.pod.deleting
