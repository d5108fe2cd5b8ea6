"""The workload that an advisor looks at, and which pods are its own.

In: the target and pods as read. Out: a label selector, and judgements about one pod. Pure. A pod that
only carries the labels is not the target's: its controller has to be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plimsoll_operator import names
from plimsoll_operator.advisor.flags import mentions_vllm
from plimsoll_operator.advisor.spec import TargetKind
from plimsoll_operator.resources import (
    DEPLOYMENT,
    LEADER_WORKER_SET,
    STATEFUL_SET,
    Resource,
)

Json = dict[str, Any]

RESOURCES: Mapping[TargetKind, Resource] = {
    TargetKind.DEPLOYMENT: DEPLOYMENT,
    TargetKind.STATEFUL_SET: STATEFUL_SET,
    TargetKind.LEADER_WORKER_SET: LEADER_WORKER_SET,
}
_GROUP_NAME = "leaderworkerset.sigs.k8s.io/name"
_WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
_TEMPLATE_HASH = "pod-template-hash"


def pod_selector(kind: TargetKind, target: Json) -> str:
    """As list requests have it."""
    if kind is TargetKind.LEADER_WORKER_SET:
        return names.label_selector({_GROUP_NAME: target["metadata"]["name"]})
    selector = target["spec"].get("selector", {})
    parts = [names.label_selector(selector.get("matchLabels", {}))]
    for each in selector.get("matchExpressions", ()):
        key, values = each["key"], ",".join(each.get("values", ()))
        parts.append(
            {
                "In": f"{key} in ({values})",
                "NotIn": f"{key} notin ({values})",
                "Exists": key,
                "DoesNotExist": f"!{key}",
            }[each["operator"]]
        )
    return ",".join(part for part in parts if part)


def belongs(pod: Json, kind: TargetKind, target: Json) -> bool:
    """Whether the target made the pod. A Deployment's pods are made by ReplicaSets that are named
    after it and the template's hash; a LeaderWorkerSet's by StatefulSets, one for each group."""
    metadata = pod["metadata"]
    owners = [each for each in metadata.get("ownerReferences", ()) if each.get("controller")]
    if not owners:
        return False
    owner, name = owners[0], target["metadata"]["name"]
    if kind is TargetKind.STATEFUL_SET:
        return bool(owner["uid"] == target["metadata"]["uid"])
    if kind is TargetKind.DEPLOYMENT:
        digest = metadata.get("labels", {}).get(_TEMPLATE_HASH)
        return bool(owner["kind"] == "ReplicaSet" and owner["name"] == f"{name}-{digest}")
    return bool(metadata.get("labels", {}).get(_GROUP_NAME) == name)


def serves(pod: Json, kind: TargetKind) -> bool:
    """In a group of pods only the leader has an API and a page."""
    if kind is not TargetKind.LEADER_WORKER_SET:
        return True
    return bool(pod["metadata"].get("labels", {}).get(_WORKER_INDEX) == "0")


def find_container(pod: Json, wanted: str | None) -> Json | None:
    """The one that is named, else the first with vLLM in its words, else the first; None when there
    is none of that name."""
    containers: list[Json] = pod["spec"]["containers"]
    if wanted is not None:
        return next((each for each in containers if each["name"] == wanted), None)
    return next((each for each in containers if mentions_vllm(each)), containers[0])


def uses_device(container: Json) -> bool:
    """Whether the kubelet gives it an accelerator: then its memory limit is host memory."""
    limits = container.get("resources", {}).get("limits", {})
    return any("/" in resource for resource in limits)
