"""The files that a Secret, ConfigMap, downward API or projected volume shows.

In: the volume source of the pod spec, the objects it names, and tokens already issued. Out: relative
path to file, or :class:`ConfigurationError` with the kubelet's message. Pure.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping

from plimsoll_local.agent.api import Json
from plimsoll_local.agent.atomic import File
from plimsoll_local.agent.environment import (
    ConfigurationError,
    Facts,
    Objects,
    decode_secret,
    field_value,
    resource_value,
)

Files = dict[str, File]
# A token by (audience, lifetime in seconds), as the source asks for them.
TokenWish = tuple[str, int]
Tokens = Mapping[TokenWish, str]

DEFAULT_MODE = 0o644
_ENVIRONMENT_REFERENCES = {
    "secretKeyRef": "secret",
    "secretRef": "secret",
    "configMapKeyRef": "configMap",
    "configMapRef": "configMap",
}
CONTENT_KINDS = frozenset({"secret", "configMap", "downwardAPI", "projected"})


def volume_files(pod: Json, volume: Json, objects: Objects, facts: Facts, tokens: Tokens) -> Files:
    """The files of one volume of a kind in CONTENT_KINDS."""
    kind = next(key for key in volume if key in CONTENT_KINDS)
    source = volume[kind]
    mode = source.get("defaultMode", DEFAULT_MODE)
    if kind != "projected":
        return _source_files(pod, kind, source, mode, objects, facts, tokens)
    files: Files = {}
    for part in source.get("sources", ()):
        for part_kind, part_source in part.items():
            files.update(_source_files(pod, part_kind, part_source, mode, objects, facts, tokens))
    return files


def token_wishes(volume: Json) -> Iterator[TokenWish]:
    """The service account tokens that a volume needs."""
    for part in volume.get("projected", {}).get("sources", ()):
        if source := part.get("serviceAccountToken"):
            yield _wish(source)


def mounted_objects(pod: Json) -> set[tuple[str, str]]:
    """("secret" or "configMap", name) of every object whose content is mounted in the pod."""
    references = set()
    for volume in pod["spec"].get("volumes", ()):
        for part in (volume, *volume.get("projected", {}).get("sources", ())):
            if "secret" in part:
                source = part["secret"]
                references.add(("secret", source.get("secretName") or source.get("name")))
            if "configMap" in part:
                references.add(("configMap", part["configMap"]["name"]))
    return references


def referenced_objects(pod: Json) -> set[tuple[str, str]]:
    """The same for every object that the pod mounts or takes environment variables from."""
    references = mounted_objects(pod)
    for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
        sources = [variable.get("valueFrom", {}) for variable in container.get("env", ())]
        for source in (*sources, *container.get("envFrom", ())):
            for field, kind in _ENVIRONMENT_REFERENCES.items():
                if field in source:
                    references.add((kind, source[field]["name"]))
    return references


def _wish(source: Json) -> TokenWish:
    return source.get("audience", ""), source.get("expirationSeconds", 3600)


def _source_files(
    pod: Json,
    kind: str,
    source: Json,
    mode: int,
    objects: Objects,
    facts: Facts,
    tokens: Tokens,
) -> Files:
    namespace = pod["metadata"]["namespace"]
    if kind == "secret":
        name = source.get("secretName") or source["name"]
        secret = objects.secret(namespace, name)
        data = None if secret is None else decode_secret(secret)
        return _select(f'secret "{name}"', data, source, mode)
    if kind == "configMap":
        config_map = objects.config_map(namespace, source["name"])
        data = None if config_map is None else _config_map_data(config_map)
        return _select(f'configmap "{source["name"]}"', data, source, mode)
    if kind == "downwardAPI":
        return _downward_files(pod, source, mode, facts)
    if kind == "serviceAccountToken":
        return {source["path"]: File(tokens[_wish(source)].encode(), mode)}
    raise ConfigurationError(f"projected volume source {kind} is not supported by this node")


def _config_map_data(config_map: Json) -> dict[str, bytes]:
    texts = {key: value.encode() for key, value in config_map.get("data", {}).items()}
    binary = config_map.get("binaryData", {})
    return {**texts, **{key: base64.b64decode(value) for key, value in binary.items()}}


def _select(what: str, data: Mapping[str, bytes] | None, source: Json, mode: int) -> Files:
    """All of ``data``, or its ``items`` under their own paths and modes."""
    optional = source.get("optional", False)
    if data is None:
        if optional:
            return {}
        raise ConfigurationError(f"{what} not found")
    items = source.get("items")
    if not items:
        return {key: File(value, mode) for key, value in data.items()}
    files = {}
    for item in items:
        if item["key"] in data:
            files[item["path"]] = File(data[item["key"]], item.get("mode", mode))
        elif not optional:
            raise ConfigurationError(f"references non-existent {what} key: {item['key']}")
    return files


def _downward_files(pod: Json, source: Json, mode: int, facts: Facts) -> Files:
    files = {}
    for item in source.get("items", ()):
        if "fieldRef" in item:
            text = field_value(pod, item["fieldRef"]["fieldPath"], facts)
        else:
            text = resource_value(pod, {}, item["resourceFieldRef"], facts)
        files[item["path"]] = File(text.encode(), item.get("mode", mode))
    return files
