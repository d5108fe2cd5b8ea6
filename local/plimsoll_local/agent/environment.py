"""A container's environment, command and downward API values from its pod's spec.

In: the pod and the container as API JSON, and the Secrets, ConfigMaps and Services of the cluster
as lookups. Out: plain strings, or :class:`ConfigurationError` with the kubelet's message. Pure.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Protocol, TypeVar

from plimsoll_local.agent.api import Json
from plimsoll_local.agent.quantities import parse_quantity

_Value = TypeVar("_Value")
_REFERENCE = re.compile(r"\$\$|\$\(([^)]*)\)")
_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")


class ConfigurationError(Exception):
    """The container cannot be made as things are; becomes CreateContainerConfigError."""


class Objects(Protocol):
    """Lookups of the objects that a pod may name; None when there is no such object."""

    def secret(self, namespace: str, name: str) -> Json | None: ...

    def config_map(self, namespace: str, name: str) -> Json | None: ...

    def services(self) -> Iterable[Json]: ...


@dataclass(frozen=True)
class Facts:
    """What only the node knows of a pod. ``allocatable`` are the node's resources: the value of a
    limit that the container does not set."""

    host_ip: str
    pod_ip: str
    node_name: str
    allocatable: Mapping[str, Decimal]


def expand(text: str, variables: Mapping[str, str]) -> str:
    """$(NAME) becomes the variable's value or stays when there is none; $$ becomes $."""

    def replace(match: re.Match[str]) -> str:
        if match.group(0) == "$$":
            return "$"
        return variables.get(match.group(1), match.group(0))

    return _REFERENCE.sub(replace, text)


def expand_all(texts: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    return [expand(text, variables) for text in texts]


def build_environment(
    pod: Json, container: Json, image_env: Mapping[str, str], objects: Objects, facts: Facts
) -> dict[str, str]:
    """The whole environment, in the kubelet's order of precedence: image, Services, envFrom, env."""
    namespace = pod["metadata"]["namespace"]
    links = pod["spec"].get("enableServiceLinks", True)
    services = service_environment(namespace, links, objects.services())
    result: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        result.update(_from_source(namespace, source, objects))
    for variable in container.get("env", ()):
        if "valueFrom" in variable:
            value = _value_from(pod, container, variable["valueFrom"], objects, facts)
            if value is None:
                continue
        else:
            value = expand(variable.get("value", ""), {**services, **result})
        result[variable["name"]] = value
    return {**image_env, **services, **result}


def service_environment(namespace: str, links: bool, services: Iterable[Json]) -> dict[str, str]:
    """The variables of Services with an address: those of the pod's namespace if ``links``, and
    always the API server's."""
    result: dict[str, str] = {}
    for service in sorted(services, key=lambda s: str(s["metadata"]["name"])):
        meta, spec = service["metadata"], service["spec"]
        address, ports = spec.get("clusterIP"), spec.get("ports", ())
        is_api = (meta["namespace"], meta["name"]) == ("default", "kubernetes")
        own = links and meta["namespace"] == namespace
        if address in (None, "", "None") or not ports or not (is_api or own):
            continue
        prefix = meta["name"].upper().replace("-", "_")
        result[f"{prefix}_SERVICE_HOST"] = address
        result[f"{prefix}_SERVICE_PORT"] = str(ports[0]["port"])
        first = ports[0]
        scheme = first.get("protocol", "TCP").lower()
        result[f"{prefix}_PORT"] = f"{scheme}://{address}:{first['port']}"
        for port in ports:
            protocol = port.get("protocol", "TCP").lower()
            if port.get("name"):
                name = port["name"].upper().replace("-", "_")
                result[f"{prefix}_SERVICE_PORT_{name}"] = str(port["port"])
            link = f"{prefix}_PORT_{port['port']}_{protocol.upper()}"
            result[link] = f"{protocol}://{address}:{port['port']}"
            result[f"{link}_PROTO"] = protocol
            result[f"{link}_PORT"] = str(port["port"])
            result[f"{link}_ADDR"] = address
    return result


def field_value(pod: Json, path: str, facts: Facts) -> str:
    """The value of a downward API field; raises ConfigurationError for an unknown one."""
    meta, spec = pod["metadata"], pod["spec"]
    if match := _SUBSCRIPT.fullmatch(path):
        return str(meta.get(match.group(1), {}).get(match.group(2), ""))
    if path in ("metadata.labels", "metadata.annotations"):
        entries = meta.get(path.removeprefix("metadata."), {})
        return "\n".join(f'{key}="{_escape(value)}"' for key, value in sorted(entries.items()))
    fields = {
        "metadata.name": meta["name"],
        "metadata.namespace": meta["namespace"],
        "metadata.uid": meta["uid"],
        "spec.nodeName": facts.node_name,
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.hostIP": facts.host_ip,
        "status.hostIPs": facts.host_ip,
        "status.podIP": facts.pod_ip,
        "status.podIPs": facts.pod_ip,
    }
    if path not in fields:
        raise ConfigurationError(f"unsupported fieldPath: {path}")
    return str(fields[path])


def resource_value(pod: Json, container: Json, reference: Json, facts: Facts) -> str:
    """A limit or request in units of the divisor, rounded up; the node's own when not set."""
    kind, _, resource = reference["resource"].partition(".")
    name = reference.get("containerName")
    if name:
        containers = pod["spec"].get("initContainers", []) + pod["spec"]["containers"]
        named = [c for c in containers if c["name"] == name]
        if not named:
            raise ConfigurationError(f"container {name} not found")
        container = named[0]
    resources = container.get("resources", {})
    if kind == "limits":
        text = resources.get("limits", {}).get(resource)
        amount = facts.allocatable.get(resource) if text is None else parse_quantity(text)
    elif kind == "requests":
        amount = parse_quantity(resources.get("requests", {}).get(resource, "0"))
    else:
        amount = None
    if amount is None:
        raise ConfigurationError(f"unsupported container resource: {reference['resource']}")
    divisor = parse_quantity(reference.get("divisor") or "1")
    return str(math.ceil(amount / (divisor or Decimal(1))))


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _from_source(namespace: str, source: Json, objects: Objects) -> dict[str, str]:
    prefix = source.get("prefix", "")
    if reference := source.get("configMapRef"):
        found = objects.config_map(namespace, reference["name"])
        data = None if found is None else found.get("data", {})
        kind = "configmap"
    else:
        reference = source["secretRef"]
        found = objects.secret(namespace, reference["name"])
        data = None if found is None else decode_secret(found)
        kind = "secret"
    if data is None:
        if reference.get("optional"):
            return {}
        raise ConfigurationError(f'{kind} "{reference["name"]}" not found')
    return {
        prefix + key: value if isinstance(value, str) else value.decode(errors="replace")
        for key, value in data.items()
    }


def _value_from(
    pod: Json, container: Json, source: Json, objects: Objects, facts: Facts
) -> str | None:
    namespace = pod["metadata"]["namespace"]
    if reference := source.get("fieldRef"):
        return field_value(pod, reference["fieldPath"], facts)
    if reference := source.get("resourceFieldRef"):
        return resource_value(pod, container, reference, facts)
    if reference := source.get("secretKeyRef"):
        secret = objects.secret(namespace, reference["name"])
        data = None if secret is None else decode_secret(secret)
        value = _pick("secret", "Secret", namespace, reference, data)
        return None if value is None else value.decode(errors="replace")
    if reference := source.get("configMapKeyRef"):
        config_map = objects.config_map(namespace, reference["name"])
        texts = None if config_map is None else config_map.get("data", {})
        return _pick("configmap", "ConfigMap", namespace, reference, texts)
    raise ConfigurationError(f"unsupported valueFrom: {', '.join(sorted(source))}")


def _pick(
    kind: str, title: str, namespace: str, reference: Json, data: Mapping[str, _Value] | None
) -> _Value | None:
    if data is None and not reference.get("optional"):
        raise ConfigurationError(f'{kind} "{reference["name"]}" not found')
    value = (data or {}).get(reference["key"])
    if value is None and not reference.get("optional"):
        raise ConfigurationError(
            f"couldn't find key {reference['key']} in {title} {namespace}/{reference['name']}"
        )
    return value


def decode_secret(secret: Json) -> dict[str, bytes]:
    """The data of a Secret, decoded."""
    return {key: base64.b64decode(value) for key, value in secret.get("data", {}).items()}
