"""Probes, Services and addresses of pods on a whole local cluster."""

from __future__ import annotations

import pytest

from support.agent_pods import SERVER, pod, python, shell
from support.local_cluster import LocalNamespace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def test_startup_readiness_and_liveness(local_namespace: LocalNamespace) -> None:
    # Started after 3 s, ready after 4 s, unhealthy after 7 s; started anew it does so again.
    script = "rm -f /tmp/*; sleep 3; touch /tmp/s; sleep 1; touch /tmp/r; sleep 3; touch /tmp/dead; sleep 600"
    container = shell(
        script,
        startupProbe={
            "exec": {"command": ["test", "-f", "/tmp/s"]},
            "periodSeconds": 1,
            "failureThreshold": 30,
        },
        readinessProbe={"exec": {"command": ["test", "-f", "/tmp/r"]}, "periodSeconds": 1},
        livenessProbe={
            "exec": {"command": ["test", "!", "-f", "/tmp/dead"]},
            "periodSeconds": 1,
            "failureThreshold": 1,
        },
    )
    local_namespace.apply(pod("probed", container))
    status = local_namespace.wait_for_container(
        "probed", lambda c: "running" in c["state"] and not c["started"], "to run, not started"
    )
    assert status["ready"] is False
    local_namespace.wait_for_container("probed", lambda c: c["started"] and c["ready"], "be ready")
    status = local_namespace.wait_for_container(
        "probed", lambda c: c["restartCount"] == 1, "restart"
    )
    assert status["lastState"]["terminated"]["exitCode"] == 137
    messages = [event["message"] for event in local_namespace.events("probed")]
    assert any(m.startswith("Liveness probe failed") for m in messages)
    assert "Container main failed liveness probe, will be restarted" in messages


def test_a_service_leads_to_ready_pods_only(local_namespace: LocalNamespace) -> None:
    server = python(
        SERVER,
        ports=[{"name": "http", "containerPort": 8080}],
        readinessProbe={"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1},
        workingDir="/tmp",
    )
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": "http"}]},
    }
    local_namespace.apply(service, pod("server", server))
    local_namespace.wait_for_ready("server")
    address = f"http://web.{local_namespace.name}.svc/"
    client = f"""
import urllib.request, time
while True:
    try:
        print(urllib.request.urlopen({address!r}, timeout=2).status, flush=True)
        break
    except OSError as error:
        print(error, flush=True)
        time.sleep(0.2)
"""
    local_namespace.apply(pod("client", python(client), restartPolicy="Never"))
    local_namespace.wait_for_phase("client", "Succeeded")
    assert local_namespace.kubectl("logs", "client").endswith("200\n")


def test_two_pods_talk_by_address(local_namespace: LocalNamespace) -> None:
    local_namespace.apply(pod("one", python(SERVER, workingDir="/tmp")))
    address = local_namespace.wait_for_ready("one")["status"]["podIP"]
    client = f"""
import socket, time
for _ in range(50):
    try:
        print(socket.create_connection(({address!r}, 8080), 2).getsockname()[0]); break
    except OSError:
        time.sleep(0.2)
"""
    local_namespace.apply(pod("two", python(client), restartPolicy="Never"))
    found = local_namespace.wait_for_phase("two", "Succeeded")
    # A pod is seen by its own address: nothing is translated.
    assert local_namespace.kubectl("logs", "two").strip() == found["status"]["podIP"] != address
