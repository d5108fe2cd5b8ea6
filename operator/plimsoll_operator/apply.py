"""Writes what differs, and nothing else: children, status and Events.

In: wanted objects and what was observed. Out: requests to the API server. Every value is written
by a server-side apply of one field manager. A pass over a settled deployment makes no request here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from plimsoll_operator import cluster as api
from plimsoll_operator import names
from plimsoll_operator.checks import Violation
from plimsoll_operator.cluster import ApiError, Cluster
from plimsoll_operator.desired.metadata import fingerprint
from plimsoll_operator.desired.status import timestamp
from plimsoll_operator.observed import Json
from plimsoll_operator.ownership import foreign_fields, is_owned, seized
from plimsoll_operator.quantities import parse_quantity
from plimsoll_operator.tuning.profile import ProfileKey, build_profile, build_profile_status
from plimsoll_operator.tuning.values import Event, Learned

logger = logging.getLogger(__name__)

# Where the API server rewrites a quantity into its canonical form.
_QUANTITIES = frozenset({"limits", "requests", "divisor", "sizeLimit"})

# An apply that changed nothing would change nothing again, unless a webhook has been mended.
FRUITLESS_SECONDS = 600.0

ChildKey = tuple[str, str]


@dataclass(frozen=True)
class Fruitless:
    """An apply that left the object as it was: ``attempt`` names what was applied onto what."""

    attempt: str
    at: float


@dataclass(frozen=True)
class Applied:
    """What one pass over the children brought: what the server refused as it is, and what it
    accepted without doing it; the latter is handed to the next pass."""

    refusals: tuple[Violation, ...] = ()
    fruitless: Mapping[ChildKey, Fruitless] = field(default_factory=dict)


def difference(wanted: object, live: object, path: str = "") -> str | None:
    """The first field of ``wanted`` that ``live`` has otherwise, as ``path: live -> wanted``;
    None when there is none. Fields that only ``live`` has do not count: most are the server's
    defaults, and drift() knows the others by their owner."""
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


def drift(wanted: Json, live: Json) -> str | None:
    """Why ``live`` is not as it is wanted, stamp and all; None when it is."""
    if foreign := foreign_fields(live):
        return f"set by somebody else: {json.dumps(foreign)}"
    if not is_owned(live):
        return "its managedFields do not say what was applied"
    return difference(wanted, live)


def are_settled(
    wanted: Mapping[ChildKey, Json | None], live: Mapping[ChildKey, Json | None]
) -> bool:
    """Nothing is to be applied or deleted."""
    return all(
        present is None
        if body is None
        else present is not None and drift(stamped(body), present) is None
        for body, present in ((body, live.get(key)) for key, body in wanted.items())
    )


async def apply_children(
    cluster: Cluster,
    wanted: Mapping[ChildKey, Json | None],
    live: Mapping[ChildKey, Json | None],
    fruitless: Mapping[ChildKey, Fruitless],
    now: float,
) -> Applied:
    """In the order of ``wanted``; None means that the child must not exist. An error that is no
    refusal is raised and the pass is tried again."""
    refusals, futile = [], {}
    for key, body in wanted.items():
        present = live.get(key)
        if body is None:
            if present is not None:
                await cluster.delete_child(present)
            continue
        try:
            outcome = await _apply_child(cluster, stamped(body), present, fruitless.get(key), now)
        except ApiError as error:
            if not error.refused:
                raise
            refusals.append(Violation("Refused", f"{' '.join(key)}: {error}"))
        else:
            if outcome is not None:
                futile[key] = outcome
    return Applied(tuple(refusals), futile)


async def _apply_child(
    cluster: Cluster, wanted: Json, live: Json | None, last: Fruitless | None, now: float
) -> Fruitless | None:
    """None unless the object stays otherwise than it is wanted."""
    if live is None:
        await cluster.apply(wanted)
        return None
    reason = drift(wanted, live)
    if reason is None:
        return None
    attempt = _attempt(wanted, live)
    known = last is not None and last.attempt == attempt
    if last is not None and known and now - last.at < FRUITLESS_SECONDS:
        return last
    child = f"{live['kind']} {live['metadata']['namespace']}/{live['metadata']['name']}"
    if foreign_fields(live):
        logger.info("%s: put back what was %s", child, reason)
        await cluster.patch_child(live, seized(live))
    written = await cluster.apply(wanted)
    if written["metadata"]["resourceVersion"] != live["metadata"]["resourceVersion"]:
        return None
    if not known:
        # The place alone: the values of a Secret are not for a log.
        place = reason.partition(": ")[0]
        logger.warning("%s: an apply is accepted and changes nothing at %s", child, place)
    return Fruitless(attempt, now)


def _attempt(wanted: Json, live: Json) -> str:
    """Without the live metadata and status, which move by themselves."""
    onto = {part: live.get(part) for part in wanted if part != "metadata"}
    return fingerprint({"wanted": wanted, "onto": onto})


async def apply_status(cluster: Cluster, resource: Json, status: Json) -> Json:
    """Writes the whole status and returns the one that the server made of it, where other owners'
    fields are left. The uid makes sure that it is still the same object."""
    metadata, kind = resource["metadata"], resource["kind"]
    body = {
        "apiVersion": names.API_VERSION,
        "kind": kind,
        "metadata": {key: metadata[key] for key in ("name", "namespace", "uid")},
        "status": status,
    }
    answer: Json = (await cluster.apply_status(api.REPORTED[kind], body)).get("status", {})
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
    """One Event on the object, as `kubectl describe` shows it."""
    metadata = resource["metadata"]
    time = timestamp(now)
    body = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{metadata['name']}.", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": resource["kind"],
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
