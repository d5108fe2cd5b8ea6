"""Whether one more replica fits on the accelerators that nobody has asked for.

In: nodes and pods as the API server has them, what one replica asks for. Out: the name of a node, or
None. Pure. A guess on the safe side, for the choice between surge and delete first: the scheduler
knows more (affinity, volumes, quota), and a surge that it finds no node for is taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from plimsoll_operator.quantities import parse_quantity

Json = dict[str, Any]

_ENDED = ("Succeeded", "Failed")
_REPELS = ("NoSchedule", "NoExecute")


def find_room(nodes: Iterable[Json], pods: Iterable[Json], template: Json) -> str | None:
    """``template`` is the pod template of one replica. The node with the most left of what it asks
    for is not looked for: the first by name will do."""
    wanted = requests_of(template["spec"])
    taken: dict[str, dict[str, float]] = {}
    for pod in pods:
        node = pod["spec"].get("nodeName")
        if node is None or pod.get("status", {}).get("phase") in _ENDED:
            continue
        on_node = taken.setdefault(node, {})
        for resource, amount in requests_of(pod["spec"]).items():
            on_node[resource] = on_node.get(resource, 0.0) + amount
    for node in sorted(nodes, key=lambda each: str(each["metadata"]["name"])):
        name = str(node["metadata"]["name"])
        if _takes(node, template["spec"]) and _fits(node, taken.get(name, {}), wanted):
            return name
    return None


def requests_of(spec: Json) -> dict[str, float]:
    """What the scheduler counts for a pod: the sum over its containers and sidecars, at least the
    largest of its init containers. A limit without a request is a request."""
    running: dict[str, float] = {}
    starting: dict[str, float] = {}
    for container in spec.get("containers", ()):
        _add(running, _requests(container))
    for container in spec.get("initContainers", ()):
        if container.get("restartPolicy") == "Always":
            _add(running, _requests(container))
        else:
            for resource, amount in _requests(container).items():
                starting[resource] = max(starting.get(resource, 0.0), amount)
    return {
        resource: max(running.get(resource, 0.0), starting.get(resource, 0.0))
        for resource in {*running, *starting}
    }


def _requests(container: Json) -> dict[str, float]:
    resources = container.get("resources", {})
    asked = {**resources.get("limits", {}), **resources.get("requests", {})}
    amounts = {name: parse_quantity(quantity) for name, quantity in asked.items()}
    return {name: float(amount) for name, amount in amounts.items() if amount is not None}


def _add(total: dict[str, float], more: Mapping[str, float]) -> None:
    for resource, amount in more.items():
        total[resource] = total.get(resource, 0.0) + amount


def _fits(node: Json, taken: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    allocatable = node.get("status", {}).get("allocatable", {})
    for resource, amount in wanted.items():
        offered = parse_quantity(allocatable.get(resource, "0"))
        if offered is None or float(offered) - taken.get(resource, 0.0) < amount:
            return False
    return True


def _takes(node: Json, spec: Json) -> bool:
    conditions = node.get("status", {}).get("conditions", ())
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    if not ready or node.get("spec", {}).get("unschedulable"):
        return False
    labels = node["metadata"].get("labels", {})
    if any(labels.get(key) != value for key, value in spec.get("nodeSelector", {}).items()):
        return False
    tolerations = spec.get("tolerations", ())
    return all(
        any(_tolerates(toleration, taint) for toleration in tolerations)
        for taint in node.get("spec", {}).get("taints", ())
        if taint["effect"] in _REPELS
    )


def _tolerates(toleration: Json, taint: Json) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    same_value = toleration.get("value", "") == taint.get("value", "")
    return bool(toleration.get("key") == taint["key"]) and same_value
