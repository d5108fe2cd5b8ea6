from typing import Any

import pytest

from plimsoll_local.services import Backend, Frontend, plan_routes


def service(name: str, address: str | None, *ports: dict[str, Any]) -> dict[str, Any]:
    return {
        "metadata": {"namespace": "n", "name": name},
        "spec": {"clusterIP": address, "ports": list(ports)},
    }


def endpoint_slice(
    service: str, ports: list[dict[str, Any]], endpoints: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "metadata": {
            "namespace": "n",
            "name": f"{service}-abc",
            "labels": {"kubernetes.io/service-name": service},
        },
        "ports": ports,
        "endpoints": endpoints,
    }


READY = {"addresses": ["10.244.0.2"], "conditions": {"ready": True}}
UNSAID = {"addresses": ["10.244.0.3"], "conditions": {}}
NOT_READY = {"addresses": ["10.244.0.4"], "conditions": {"ready": False}}
HTTP = {"name": "http", "port": 80}


@pytest.mark.parametrize(
    ("services", "slices", "routes"),
    [
        pytest.param([], [], {}, id="nothing"),
        pytest.param(
            [service("a", "10.0.0.5", HTTP)],
            [],
            {Frontend("10.0.0.5", 80): ()},
            id="no endpoints yet: listens, leads nowhere",
        ),
        pytest.param([service("a", "None", HTTP)], [], {}, id="headless"),
        pytest.param(
            [service("a", "10.0.0.5", {**HTTP, "protocol": "UDP"})], [], {}, id="UDP is left out"
        ),
        pytest.param(
            [service("a", "10.0.0.5", HTTP)],
            [endpoint_slice("a", [{"name": "http", "port": 8000}], [UNSAID, READY, NOT_READY])],
            {Frontend("10.0.0.5", 80): (Backend("10.244.0.2", 8000), Backend("10.244.0.3", 8000))},
            id="ready and unsaid endpoints, in order",
        ),
        pytest.param(
            [service("a", "10.0.0.5", HTTP, {"name": "control", "port": 81})],
            [
                endpoint_slice(
                    "a",
                    [{"name": "http", "port": 8000}, {"name": "control", "port": 8001}],
                    [READY],
                )
            ],
            {
                Frontend("10.0.0.5", 80): (Backend("10.244.0.2", 8000),),
                Frontend("10.0.0.5", 81): (Backend("10.244.0.2", 8001),),
            },
            id="ports by name",
        ),
        pytest.param(
            [service("a", "10.0.0.5", HTTP)],
            [endpoint_slice("b", [{"name": "http", "port": 8000}], [READY])],
            {Frontend("10.0.0.5", 80): ()},
            id="another service's slice",
        ),
    ],
)
def test_routes(
    services: list[Any], slices: list[Any], routes: dict[Frontend, tuple[Backend, ...]]
) -> None:
    assert plan_routes(services, slices) == routes
