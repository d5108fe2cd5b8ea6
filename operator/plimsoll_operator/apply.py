"""Writes what differs, and nothing else: children, status and Events.

In: wanted objects and what was observed. Out: requests to the API server. Every write is a
server-side apply by one field manager. A pass over a settled deployment makes no request here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from plimsoll_operator import cluster as api
from plimsoll_operator import names
from plimsoll_operator.checks import Violation
from plimsoll_operator.cluster import ApiError, Cluster
from plimsoll_operator.desired.metadata import fingerprint
from plimsoll_operator.desired.status import timestamp
from plimsoll_operator.observed import Json
from plimsoll_operator.quantities import parse_quantity
from plimsoll_operator.tuning.profile import ProfileKey, build_profile, build_profile_status
from plimsoll_operator.tuning.values import Event, Learned

# Where the API server rewrites a quantity into its canonical form.
_QUANTITIES = frozenset({"limits", "requests"})


def difference(wanted: object, live: object, path: str = "") -> str | None:
    """The first field of ``wanted`` that ``live`` has otherwise, as ``path: live -> wanted``;
    None when there is none. Fields that only ``live`` has (the server's defaults, other owners')
    do not count."""
    if isinstance(wanted, dict) and isinstance(live, dict):
        for key, value in wanted.items():
            inner = f"{path}.{key}" if path else key
            found = difference(value, live.get(key), inner)
            if found is not None:
                return found
        return None
    if isinstance(wanted, list) and isinstance(live, list) and len(wanted) == len(live):
        for index, (one, other) in enumerate(zip(wanted, live, strict=True)):
            found = difference(one, other, f"{path}[{index}]")
            if found is not None:
                return found
        return None
    if wanted == live or (_is_quantity(path) and _same_quantity(wanted, live)):
        return None
    # The server drops empty values.
    if live is None and wanted in ({}, [], "", False):
        return None
    return f"{path}: {json.dumps(live)} -> {json.dumps(wanted)}"


def _is_quantity(path: str) -> bool:
    parts = path.split(".", maxsplit=20)
    return any(part in _QUANTITIES for part in parts)


def _same_quantity(wanted: object, live: object) -> bool:
    number = parse_quantity(wanted)
    return number is not None and number == parse_quantity(live)


def stamped(body: Json) -> Json:
    """The object with its hash in an annotation."""
    metadata = body["metadata"]
    annotations = {**metadata.get("annotations", {}), names.APPLIED_ANNOTATION: fingerprint(body)}
    return {**body, "metadata": {**metadata, "annotations": annotations}}


def is_applied(body: Json, live: Json | None) -> bool:
    """True when the cluster has this object as it is wanted."""
    return live is not None and difference(stamped(body), live) is None


async def apply_children(
    cluster: Cluster,
    wanted: Mapping[tuple[str, str], Json | None],
    live: Mapping[tuple[str, str], Json | None],
) -> tuple[Violation, ...]:
    """In the order of ``wanted``; None means that the child must not exist. What the server
    refuses as it is comes back; any other error is raised and the pass is tried again."""
    refusals = []
    for (kind, name), body in wanted.items():
        present = live.get((kind, name))
        if body is None:
            if present is not None:
                await cluster.delete_child(present)
        elif not is_applied(body, present):
            try:
                await cluster.apply(stamped(body))
            except ApiError as error:
                if not error.refused:
                    raise
                refusals.append(Violation("Refused", f"{kind} {name}: {error}"))
    return tuple(refusals)


async def apply_status(cluster: Cluster, resource: Json, status: Json) -> Json:
    """Writes the whole status and returns the one that the server made of it, where other owners'
    fields are left. The uid makes sure that it is still the same object."""
    metadata = resource["metadata"]
    body = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {key: metadata[key] for key in ("name", "namespace", "uid")},
        "status": status,
    }
    answer: Json = (await cluster.apply_status(api.LLM_DEPLOYMENT, body)).get("status", {})
    return answer


async def apply_profile(
    cluster: Cluster, namespace: str, key: ProfileKey, learned: Learned
) -> None:
    """Writes what was learned; the first time, the MemoryProfile with it."""
    profile = build_profile(namespace, key)
    await cluster.apply(profile)
    status = build_profile_status(learned)
    await cluster.apply_status(api.MEMORY_PROFILE, {**profile, "status": status})


async def record_event(cluster: Cluster, resource: Json, event: Event, now: float) -> None:
    """One Event on the LLMDeployment, as `kubectl describe` shows it."""
    metadata = resource["metadata"]
    time = timestamp(now)
    body = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{metadata['name']}.", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            **{key: metadata[key] for key in ("name", "namespace", "uid")},
        },
        "reason": event.reason,
        "message": event.message[:1024],
        "type": "Warning" if event.warning else "Normal",
        "source": {"component": names.COMPONENT},
        "reportingComponent": names.COMPONENT,
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }
    await cluster.create(api.EVENT, metadata["namespace"], body)
