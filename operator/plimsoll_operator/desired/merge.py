"""A part of a PodSpec merged over another, as `kubectl patch` does it (strategic merge).

In: two plain structures. Out: a third; neither is changed. Maps are merged by key and a null removes;
the lists of ``_MERGE_KEYS`` are merged by the key that Kubernetes' own types name for them
(`patchMergeKey` in k8s.io/api/core/v1), with what is new last; any other list is replaced. Directives
($patch and the like) are not known here. Knows no LLMDeployment.
"""

from __future__ import annotations

from typing import Any

from plimsoll_operator.spec import InvalidSpec

Json = dict[str, Any]

FIELD = "spec.podTemplate.patch"

_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
# Of these a volume has one at most: another kind takes the place of ours instead of joining it.
_EXCLUSIVE = "volumes"


def merged(base: Json, patch: Json, path: str = FIELD) -> Json:
    """Raises InvalidSpec for a list entry without its merge key, and for a directive."""
    result = dict(base)
    for key, value in patch.items():
        inner = f"{path}.{key}"
        if key.startswith("$"):
            raise InvalidSpec(path, key, "fields of a pod; directives are not supported")
        present = base.get(key)
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = merged(present if isinstance(present, dict) else {}, value, inner)
        elif isinstance(value, list) and key in _MERGE_KEYS:
            result[key] = _merged_list(present or [], value, key, inner)
        else:
            result[key] = value
    return result


def _merged_list(base: list[Json], patch: list[Any], field: str, path: str) -> list[Json]:
    name = _MERGE_KEYS[field]
    result = {entry[name]: entry for entry in base}
    for index, entry in enumerate(patch):
        where = f"{path}[{index}]"
        if not isinstance(entry, dict) or name not in entry:
            raise InvalidSpec(where, entry, f"an object with the field {name}")
        present = result.get(entry[name], {})
        if field == _EXCLUSIVE and set(entry) - set(present):
            present = {}
        result[entry[name]] = merged(present, entry, where)
    return list(result.values())
