"""A container's environment: expansion, sources, precedence, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import pytest

from plimsoll_local.agent.environment import (
    ConfigurationError,
    Facts,
    build_environment,
    expand,
    field_value,
    resource_value,
    service_environment,
)
from support.pods import Json, build_container, build_pod

FACTS = Facts(
    host_ip="10.244.0.1",
    pod_ip="10.244.0.7",
    node_name="node-1",
    allocatable={"cpu": Decimal(2), "memory": Decimal(4 << 30)},
)


@dataclass(frozen=True)
class FakeObjects:
    secrets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    config_maps: dict[str, dict[str, str]] = field(default_factory=dict)
    listed: tuple[Json, ...] = ()

    def secret(self, namespace: str, name: str) -> Json | None:
        if name not in self.secrets:
            return None
        return {"data": {k: base64.b64encode(v).decode() for k, v in self.secrets[name].items()}}

    def config_map(self, namespace: str, name: str) -> Json | None:
        return {"data": self.config_maps[name]} if name in self.config_maps else None

    def services(self) -> Iterable[Json]:
        return self.listed


def service(name: str, address: str, *ports: Json, namespace: str = "default") -> Json:
    return {
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"clusterIP": address, "ports": list(ports)},
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)-$(B)", "1-two"),
        ("$$(A)", "$(A)"),  # escaped
        ("$$$(A)", "$1"),
        ("$(MISSING)", "$(MISSING)"),  # stays as it is
        ("$A ${A} $", "$A ${A} $"),  # not our syntax
        ("$(A", "$(A"),
        ("", ""),
    ],
)
def test_references_are_expanded(text: str, expected: str) -> None:
    assert expand(text, {"A": "1", "B": "two"}) == expected


def build(container: Json, objects: FakeObjects, **spec: Any) -> dict[str, str]:
    pod = build_pod(containers=(container,), **spec)
    return build_environment(pod, container, {"PATH": "/bin", "A": "image"}, objects, FACTS)


def test_a_variable_sees_those_before_it_and_overrides_sources() -> None:
    container = build_container(
        envFrom=[{"prefix": "P_", "configMapRef": {"name": "cm"}}],
        env=[
            {"name": "A", "value": "own"},
            {"name": "B", "value": "$(A)/$(P_X)/$(LATER)"},
            {"name": "P_X", "value": "over"},
            {"name": "LATER", "value": "z"},
        ],
    )
    found = build(container, FakeObjects(config_maps={"cm": {"X": "1"}}))
    assert found == {
        "PATH": "/bin",
        "A": "own",
        "B": "own/1/$(LATER)",
        "P_X": "over",
        "LATER": "z",
    }


def test_values_come_from_secrets_maps_fields_and_resources() -> None:
    container = build_container(
        resources={"limits": {"memory": "600Mi", "cpu": "1500m"}},
        env=[
            {"name": "S", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            {"name": "C", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "MEM", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory"}}},
            {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
            {
                "name": "GONE",
                "valueFrom": {"secretKeyRef": {"name": "no", "key": "k", "optional": True}},
            },
        ],
    )
    objects = FakeObjects(secrets={"s": {"k": b"hunter2"}}, config_maps={"c": {"k": "v"}})
    found = build(container, objects)
    assert {name: found.get(name) for name in ("S", "C", "IP", "MEM", "CPU", "GONE")} == {
        "S": "hunter2",
        "C": "v",
        "IP": "10.244.0.7",
        "MEM": str(600 << 20),
        "CPU": "2",  # rounded up
        "GONE": None,
    }


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ({"secretKeyRef": {"name": "no", "key": "k"}}, 'secret "no" not found'),
        (
            {"secretKeyRef": {"name": "s", "key": "no"}},
            "couldn't find key no in Secret default/s",
        ),
        ({"configMapKeyRef": {"name": "no", "key": "k"}}, 'configmap "no" not found'),
        ({"fieldRef": {"fieldPath": "status.phase"}}, "unsupported fieldPath: status.phase"),
        ({"fileKeyRef": {}}, "unsupported valueFrom: fileKeyRef"),
    ],
)
def test_what_cannot_be_resolved_is_named(reference: Json, message: str) -> None:
    container = build_container(env=[{"name": "X", "valueFrom": reference}])
    with pytest.raises(ConfigurationError, match=message):
        build(container, FakeObjects(secrets={"s": {"k": b""}}))


def test_a_missing_source_is_refused_unless_optional() -> None:
    needed = build_container(envFrom=[{"secretRef": {"name": "no"}}])
    with pytest.raises(ConfigurationError, match='secret "no" not found'):
        build(needed, FakeObjects())
    optional = build_container(envFrom=[{"secretRef": {"name": "no", "optional": True}}])
    assert build(optional, FakeObjects()) == {"PATH": "/bin", "A": "image"}


@pytest.mark.parametrize(
    ("resource", "divisor", "expected"),
    [
        ("limits.memory", None, str(4 << 30)),  # not set: the node's own
        ("limits.memory", "1Gi", "4"),
        ("limits.cpu", "1m", "2000"),
        ("requests.cpu", "1m", "250"),
        ("requests.memory", "1", "0"),
    ],
)
def test_resources_are_counted_in_units_of_the_divisor(
    resource: str, divisor: str | None, expected: str
) -> None:
    container = build_container(resources={"requests": {"cpu": "250m"}})
    reference = {"resource": resource, **({"divisor": divisor} if divisor else {})}
    assert resource_value(build_pod(), container, reference, FACTS) == expected


def test_labels_are_fields_alone_and_together() -> None:
    pod = build_pod(metadata={"labels": {"b": 'x"y', "a/b": "1"}})
    assert field_value(pod, "metadata.labels['a/b']", FACTS) == "1"
    assert field_value(pod, "metadata.labels['none']", FACTS) == ""
    assert field_value(pod, "metadata.labels", FACTS) == 'a/b="1"\nb="x\\"y"'


def test_services_become_variables_as_a_kubelet_names_them() -> None:
    services = (
        service("kubernetes", "10.0.0.1", {"name": "https", "port": 443}),
        service("my-db", "10.0.0.9", {"port": 5432}),
        service("headless", "None", {"port": 1}),
        service("far", "10.0.0.8", {"port": 1}, namespace="other"),
    )
    alone = service_environment("other-one", True, services)
    assert alone["KUBERNETES_SERVICE_HOST"] == "10.0.0.1"
    assert alone["KUBERNETES_SERVICE_PORT_HTTPS"] == "443"
    assert not any(name.startswith("MY_DB") for name in alone)
    linked = service_environment("default", True, services)
    assert linked["MY_DB_SERVICE_PORT"] == "5432"
    assert linked["MY_DB_PORT_5432_TCP_ADDR"] == "10.0.0.9"
    assert not any(name.startswith(("FAR", "HEADLESS")) for name in linked)
    unlinked = service_environment("default", False, services)
    assert {name.split("_")[0] for name in unlinked} == {"KUBERNETES"}
