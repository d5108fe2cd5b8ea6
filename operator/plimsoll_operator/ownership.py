"""Which fields of a child somebody else has set, and how they become the operator's to remove.

In: an object as the API server has it, with its managedFields. Out: fields in the server's own form
(``{"f:spec": {"f:selector": {}}}``). Pure. The server's defaults belong to nobody there, which is
what tells them from a field that somebody added. Knows no kind and not what is wanted.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from plimsoll_operator import names

Json = dict[str, Any]

# Left to whoever sets them: labels and annotations (on the pod template too, where `kubectl rollout
# restart` asks for new pods), status, and the addresses that the cluster allots to a Service.
_SHARED = frozenset(
    {"f:metadata", "f:status", "f:clusterIP", "f:clusterIPs", "f:ipFamilies", "f:ipFamilyPolicy"}
)
# Marks the map, list or item itself as owned, beside its fields.
_ITSELF = "."


def is_owned(live: Json) -> bool:
    """False when it does not say what was applied: never applied, or managedFields were cleared."""
    return any(_is_ours(entry) for entry in _entries(live))


def applied_at(live: Json) -> str | None:
    """When the operator last changed it, as the API server writes times."""
    times: list[str] = [
        entry["time"] for entry in _entries(live) if _is_ours(entry) and "time" in entry
    ]
    return max(times, default=None)


def foreign_fields(live: Json) -> Json:
    """What others have set beyond what was applied, outside what is left to them. A field that
    somebody took over, such as a whole selector, counts too."""
    own = _own_fields(live)
    theirs = (entry["fieldsV1"] for entry in _entries(live) if _is_theirs(entry))
    return reduce(_joined, (_beyond(fields, own) for fields in theirs), {})


def seized(live: Json) -> Json:
    """A merge patch after which the foreign fields count as applied by the operator, so that the
    next apply, which has not got them, removes them. Only so does one apply repair everything at
    once, with no state in between. The resourceVersion makes sure that nothing moved meanwhile;
    without its hash the object counts as different until that apply has happened."""
    own, foreign = _own_fields(live), foreign_fields(live)
    others = []
    for entry in _entries(live):
        if _is_theirs(entry):
            left = _without(entry["fieldsV1"], foreign)
            others += [{**entry, "fieldsV1": left}] if left else []
        elif not _is_ours(entry):
            others.append(entry)
    mine = next((entry for entry in _entries(live) if _is_ours(entry)), _new_entry(live))
    metadata = live["metadata"]
    return {
        "metadata": {
            "uid": metadata["uid"],
            "resourceVersion": metadata["resourceVersion"],
            "annotations": {names.APPLIED_ANNOTATION: None},
            "managedFields": [{**mine, "fieldsV1": _joined(own, foreign)}, *others],
        }
    }


def _entries(live: Json) -> list[Json]:
    entries = live["metadata"].get("managedFields", [])
    return [{"fieldsV1": {}, **entry} for entry in entries]


def _new_entry(live: Json) -> Json:
    return {
        "manager": names.FIELD_MANAGER,
        "operation": "Apply",
        "apiVersion": live["apiVersion"],
        "fieldsType": "FieldsV1",
    }


def _is_ours(entry: Json) -> bool:
    return (entry["manager"], entry["operation"]) == (names.FIELD_MANAGER, "Apply")


def _is_theirs(entry: Json) -> bool:
    """What a webhook makes of our own writes has our name and another operation: not foreign."""
    return entry["manager"] != names.FIELD_MANAGER and entry.get("subresource") != "status"


def _own_fields(live: Json) -> Json:
    own: Json = next((entry["fieldsV1"] for entry in _entries(live) if _is_ours(entry)), {})
    return own


def _beyond(theirs: Json, own: Json) -> Json:
    """The part of ``theirs`` that is not in ``own``."""
    found: Json = {}
    for key, inner in theirs.items():
        if key == _ITSELF or key in _SHARED:
            continue
        if key not in own:
            found[key] = inner
        elif deeper := _beyond(inner, own[key]):
            found[key] = deeper
    return found


def _joined(one: Json, other: Json) -> Json:
    joined = dict(one)
    for key, inner in other.items():
        joined[key] = _joined(one[key], inner) if key in one else inner
    return joined


def _without(fields: Json, gone: Json) -> Json:
    left: Json = {}
    for key, inner in fields.items():
        if key not in gone:
            left[key] = inner
        # A part that is empty now must go: an empty one would stand for the whole.
        elif set(rest := _without(inner, gone[key])) - {_ITSELF}:
            left[key] = rest
    return left
