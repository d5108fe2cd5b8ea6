"""Pods on a whole local cluster: what a kubelet does with them, seen through the API server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from support.local_cluster import Json, LocalCluster, LocalNamespace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

PYTHON = "python:local"
SHELL = "busybox:local"


def pod(name: str, container: Json, **spec: Any) -> Json:
    # One second: nothing here needs longer to end, and a shell has no handler for SIGTERM.
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "main", "image": SHELL, **container}],
            **spec,
        },
    }


def shell(text: str, **fields: Any) -> Json:
    return {"command": ["sh", "-c", text], **fields}


def python(text: str, **fields: Any) -> Json:
    return {"image": PYTHON, "command": ["python3", "-c", text], **fields}


SERVER = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=8080, bind='0.0.0.0')"


def test_a_container_over_its_limit_is_killed_and_comes_back(
    local_namespace: LocalNamespace,
) -> None:
    program = python("x = bytearray(b'x') * (300 << 20)", resources={"limits": {"memory": "96Mi"}})
    local_namespace.apply(pod("oom", program))
    status = local_namespace.wait_for_container(
        "oom",
        lambda c: c["restartCount"] >= 2 and "CrashLoopBackOff" in str(c["state"]),
        "to be in CrashLoopBackOff",
    )
    last = status["lastState"]["terminated"]
    assert (last["reason"], last["exitCode"]) == ("OOMKilled", 137)
    assert status["ready"] is False
    found = local_namespace.pod("oom")
    assert found is not None
    assert found["status"]["phase"] == "Running"
    reasons = {event["reason"] for event in local_namespace.events("oom")}
    assert {"Pulled", "Created", "Started", "BackOff"} <= reasons


def test_restarts_wait_longer_each_time(local_namespace: LocalNamespace) -> None:
    local_namespace.apply(pod("crash", shell("exit 7")))
    status = local_namespace.wait_for_container(
        "crash", lambda c: c["restartCount"] >= 3 and "waiting" in c["state"], "4 starts"
    )
    message = status["state"]["waiting"]["message"]
    # The third restart came 2 + 4 s after the first failure; the fourth waits 8 s.
    assert message.startswith("back-off 8s restarting failed container=main pod=crash_")
    assert status["lastState"]["terminated"]["exitCode"] == 7


def test_termination_messages_by_file_and_by_log(local_namespace: LocalNamespace) -> None:
    writes = shell("echo because > /dev/termination-log; exit 3")
    elsewhere = shell("echo there > /run/end; exit 0", terminationMessagePath="/run/end")
    falls_back = shell(
        "for i in $(seq 200); do echo line $i; done; exit 1",
        terminationMessagePolicy="FallbackToLogsOnError",
    )
    local_namespace.apply(
        pod("writes", writes, restartPolicy="Never"),
        pod("elsewhere", elsewhere, restartPolicy="Never"),
        pod("falls-back", falls_back, restartPolicy="Never"),
    )

    def end(name: str) -> Json:
        local_namespace.wait_for_phase(name, "Succeeded", "Failed")
        status = local_namespace.container(name)
        assert status is not None
        found: Json = status["state"]["terminated"]
        return found

    assert end("writes") | {"message": "because\n", "exitCode": 3, "reason": "Error"} == end(
        "writes"
    )
    assert end("elsewhere")["message"] == "there\n"
    assert end("elsewhere")["reason"] == "Completed"
    lines = end("falls-back")["message"].splitlines()
    assert (len(lines), lines[0], lines[-1]) == (80, "line 121", "line 200")


def test_restart_policies_and_phases(local_namespace: LocalNamespace) -> None:
    local_namespace.apply(
        pod("done", shell("exit 0"), restartPolicy="OnFailure"),
        pod("failed", shell("exit 1"), restartPolicy="Never"),
        pod("missing", shell("x", command=["/no/such/program"]), restartPolicy="Never"),
    )
    assert local_namespace.wait_for_phase("done", "Succeeded")["status"]["podIP"]
    local_namespace.wait_for_phase("failed", "Failed")
    local_namespace.wait_for_phase("missing", "Failed")
    status = local_namespace.container("missing")
    assert status is not None
    end = status["state"]["terminated"]
    assert (end["exitCode"], end["reason"]) == (128, "StartError")
    assert "/no/such/program" in end["message"]


def test_an_unknown_image_waits_and_says_which(local_namespace: LocalNamespace) -> None:
    local_namespace.apply(pod("unknown", {"image": "example.com/none:1"}))
    status = local_namespace.wait_for_container(
        "unknown",
        lambda c: c["state"].get("waiting", {}).get("reason") == "ImagePullBackOff",
        "to be in ImagePullBackOff",
    )
    assert "example.com/none:1" in status["state"]["waiting"]["message"]
    messages = [event["message"] for event in local_namespace.events("unknown")]
    assert "Error: ErrImagePull" in messages


def test_mounted_content_and_environment(local_namespace: LocalNamespace) -> None:
    script = """
import os, pathlib, json
def files(path):
    return {p.name: p.read_text() for p in pathlib.Path(path).iterdir() if not p.name.startswith("..")}
account = files("/var/run/secrets/kubernetes.io/serviceaccount")
print(json.dumps({
    "secret": files("/secret"), "config": files("/config"), "labels": files("/pod"),
    "account": sorted(account), "namespace": account["namespace"],
    "env": {k: os.environ.get(k) for k in ("SECRET", "NODE", "MEMORY", "JOINED", "FROM_a")},
    "host": os.uname().nodename,
    "api": os.environ["KUBERNETES_SERVICE_HOST"],
    "memory_size": os.statvfs("/memory").f_blocks * os.statvfs("/memory").f_frsize,
}), flush=True)
import time; time.sleep(600)
"""
    container = python(
        script,
        resources={"limits": {"memory": "128Mi"}},
        envFrom=[{"prefix": "FROM_", "configMapRef": {"name": "c"}}],
        env=[
            {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "MEMORY", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory"}}},
            {"name": "JOINED", "value": "$(SECRET)!"},
        ],
        volumeMounts=[
            {"name": "secret", "mountPath": "/secret"},
            {"name": "config", "mountPath": "/config"},
            {"name": "pod", "mountPath": "/pod"},
            {"name": "memory", "mountPath": "/memory"},
        ],
    )
    label = {"path": "app", "fieldRef": {"fieldPath": "metadata.labels['app']"}}
    volumes: list[Json] = [
        {"name": "secret", "secret": {"secretName": "s"}},
        {"name": "config", "configMap": {"name": "c"}},
        {"name": "pod", "downwardAPI": {"items": [label]}},
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "8Mi"}},
    ]
    local_namespace.apply(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"k": "v"}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "1"}},
        pod("content", container, volumes=volumes),
    )
    seen = json.loads(local_namespace.wait_for_log("content", "}\n"))
    assert seen == {
        "secret": {"k": "v"},
        "config": {"a": "1"},
        "labels": {"app": "content"},
        "account": ["ca.crt", "namespace", "token"],
        "namespace": local_namespace.name,
        "env": {
            "SECRET": "v",
            "NODE": "plimsoll-local",
            "MEMORY": str(128 << 20),
            "JOINED": "v!",
            "FROM_a": "1",
        },
        "host": "content",
        "api": "10.0.0.1",
        "memory_size": 8 << 20,
    }


def test_a_pod_speaks_to_the_api_server_with_its_token(local_namespace: LocalNamespace) -> None:
    script = """
import ssl, urllib.error, urllib.request
account = "/var/run/secrets/kubernetes.io/serviceaccount/"
namespace, token = (open(account + name).read() for name in ("namespace", "token"))
request = urllib.request.Request(
    f"https://kubernetes.default.svc/api/v1/namespaces/{namespace}/secrets",
    headers={"Authorization": f"Bearer {token}"},
)
try:
    urllib.request.urlopen(request, context=ssl.create_default_context(cafile=account + "ca.crt"))
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""
    local_namespace.apply(pod("caller", python(script), restartPolicy="Never"))
    local_namespace.wait_for_phase("caller", "Succeeded")
    answer = local_namespace.kubectl("logs", "caller")
    # Known, by certificate and name of the Service, and not allowed to read Secrets.
    assert answer.startswith("403 ")
    assert f"system:serviceaccount:{local_namespace.name}:default" in answer


def test_mounted_configuration_changes_while_it_is_mounted(local_namespace: LocalNamespace) -> None:
    def config(text: str) -> Json:
        meta = {"name": "live"}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"a": text}}

    container = shell(
        "while :; do cat /config/a; sleep 0.2; done",
        volumeMounts=[{"name": "config", "mountPath": "/config"}],
    )
    volumes = [{"name": "config", "configMap": {"name": "live"}}]
    local_namespace.apply(config("first\n"), pod("live", container, volumes=volumes))
    local_namespace.wait_for_log("live", "first")
    local_namespace.apply(config("second\n"))
    local_namespace.wait_for_log("live", "second")


def test_a_pod_waits_for_what_it_names(local_namespace: LocalNamespace) -> None:
    needs_env = shell(
        "echo $X; sleep 600",
        env=[{"name": "X", "valueFrom": {"secretKeyRef": {"name": "late", "key": "k"}}}],
    )
    needs_volume = shell("cat /s/k; sleep 600", volumeMounts=[{"name": "late", "mountPath": "/s"}])
    volumes = [{"name": "late", "secret": {"secretName": "late"}}]
    local_namespace.apply(pod("by-env", needs_env), pod("by-volume", needs_volume, volumes=volumes))
    status = local_namespace.wait_for_container(
        "by-env",
        lambda c: c["state"].get("waiting", {}).get("reason") == "CreateContainerConfigError",
        "to lack its Secret",
    )
    assert status["state"]["waiting"]["message"] == 'secret "late" not found'
    local_namespace.cluster.wait_for(
        lambda: [e for e in local_namespace.events("by-volume") if e["reason"] == "FailedMount"],
        "an Event about the mount",
    )
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "late"}}
    local_namespace.apply({**secret, "stringData": {"k": "here\n"}})
    local_namespace.wait_for_log("by-env", "here")
    local_namespace.wait_for_log("by-volume", "here")


def test_a_claimed_volume_outlives_its_pod(
    local_namespace: LocalNamespace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("volume")
    name = f"pv-{local_namespace.name}"
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "",
            "claimRef": {"namespace": local_namespace.name, "name": "claim"},
            "hostPath": {"path": str(directory)},
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "claim"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "",
            "volumeName": name,
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    container = shell(
        "echo kept > /models/part/file", volumeMounts=[{"name": "models", "mountPath": "/models"}]
    )
    (directory / "part").mkdir()
    volumes = [{"name": "models", "persistentVolumeClaim": {"claimName": "claim"}}]
    local_namespace.apply(
        volume, claim, pod("writer", container, volumes=volumes, restartPolicy="Never")
    )
    local_namespace.wait_for_phase("writer", "Succeeded")
    assert (directory / "part" / "file").read_text() == "kept\n"
    local_namespace.cluster.kubectl("delete", "pv", name, "--wait=false")


def test_init_containers_run_first_and_share_volumes(local_namespace: LocalNamespace) -> None:
    mount = [{"name": "data", "mountPath": "/data"}]
    init = {"name": "init", "image": SHELL, **shell("echo made > /data/x", volumeMounts=mount)}
    local_namespace.apply(
        pod(
            "init",
            shell("cat /data/x", volumeMounts=mount),
            initContainers=[init],
            volumes=[{"name": "data", "emptyDir": {}}],
            restartPolicy="Never",
        )
    )
    local_namespace.wait_for_phase("init", "Succeeded")
    assert local_namespace.kubectl("logs", "init") == "made\n"
    status = local_namespace.container("init", "init")
    assert status is not None
    assert (status["ready"], status["state"]["terminated"]["reason"]) == (True, "Completed")


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


def test_graceful_termination_runs_the_hook_and_waits(
    local_namespace: LocalNamespace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("hook")
    container = shell(
        "trap 'echo term >> /out/log; exit 0' TERM; echo up; while :; do sleep 0.1; done",
        lifecycle={"preStop": {"exec": {"command": ["sh", "-c", "echo hook >> /out/log"]}}},
        volumeMounts=[{"name": "out", "mountPath": "/out"}],
    )
    volumes = [{"name": "out", "hostPath": {"path": str(directory)}}]
    local_namespace.apply(
        pod("polite", container, volumes=volumes, terminationGracePeriodSeconds=60)
    )
    local_namespace.wait_for_log("polite", "up")
    began = time.monotonic()
    local_namespace.kubectl("delete", "pod", "polite")
    assert (directory / "log").read_text() == "hook\nterm\n"
    assert time.monotonic() - began < 50


def test_what_does_not_end_in_its_grace_period_is_killed(local_namespace: LocalNamespace) -> None:
    local_namespace.apply(
        pod("stubborn", shell("echo up; sleep 600"), terminationGracePeriodSeconds=3)
    )
    local_namespace.wait_for_log("stubborn", "up")
    began = time.monotonic()
    local_namespace.kubectl("delete", "pod", "stubborn")
    assert 3 <= time.monotonic() - began < 25
    assert local_namespace.pod("stubborn") is None


def test_logs_as_kubectl_asks_for_them(local_namespace: LocalNamespace) -> None:
    script = "echo one; echo two; echo three; [ -f /data/x ] || { touch /data/x; exit 1; }; sleep 2; echo last; sleep 600"
    mount = [{"name": "data", "mountPath": "/data"}]
    local_namespace.apply(
        pod("log", shell(script, volumeMounts=mount), volumes=[{"name": "data", "emptyDir": {}}])
    )
    local_namespace.wait_for_container("log", lambda c: c["restartCount"] == 1, "a restart")
    assert local_namespace.kubectl("logs", "log", "--previous").split() == ["one", "two", "three"]
    follower = subprocess.Popen(
        [local_namespace.cluster.kubectl_path, "logs", "-f", "log", "-n", local_namespace.name],
        env={
            **os.environ,
            "KUBECONFIG": str(local_namespace.cluster.cluster.kubeconfig_path),
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    with follower:
        assert follower.stdout is not None
        lines = [follower.stdout.readline().strip() for _ in range(4)]
        follower.terminate()
    assert lines == ["one", "two", "three", "last"]
    assert local_namespace.kubectl("logs", "log", "--tail=1") == "last\n"
    stamped = local_namespace.kubectl("logs", "log", "--timestamps", "--tail=1")
    assert stamped.startswith("20")
    assert stamped.endswith("Z last\n")
    for verb in (("exec", "log", "--", "true"), ("port-forward", "log", "18080:8080")):
        with pytest.raises(subprocess.CalledProcessError) as refused:
            local_namespace.kubectl(*verb)
        assert "not supported by the local node agent" in refused.value.stderr


def test_a_settled_pod_is_not_written_again(local_namespace: LocalNamespace) -> None:
    probe = {"exec": {"command": ["true"]}, "periodSeconds": 1}
    local_namespace.apply(
        pod("calm", shell("sleep 600", readinessProbe=probe, livenessProbe=probe))
    )
    before = local_namespace.wait_for_ready("calm")["metadata"]["resourceVersion"]
    time.sleep(4)
    found = local_namespace.pod("calm")
    assert found is not None
    assert found["metadata"]["resourceVersion"] == before


def test_a_killed_agent_leaves_nothing_and_its_successor_goes_on(
    local_namespace: LocalNamespace,
) -> None:
    marker = "86397"
    local_namespace.apply(pod("held", shell(f"echo up; exec sleep {marker}")))
    local_namespace.wait_for_log("held", "up")

    def find(*words: str) -> list[int]:
        """Processes with these words in this order at the end of the interpreter's arguments."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                arguments = (entry / "cmdline").read_text().split("\0")
            except OSError:
                continue
            if "\0".join(words) in "\0".join(arguments):
                found.append(int(entry.name))
        return found

    kubeconfig = local_namespace.cluster.cluster.directory / "controlplane" / "kubeconfig"
    (agent,) = find("plimsoll_local.agent", "--kubeconfig", str(kubeconfig))
    (held,) = find("sleep", marker)
    os.kill(agent, signal.SIGKILL)
    local_namespace.cluster.wait_for(
        lambda: held not in find("sleep", marker), "its container's end"
    )
    status = local_namespace.wait_for_container(
        "held", lambda c: c["restartCount"] == 1 and c["ready"], "to run again"
    )
    last = status["lastState"]["terminated"]
    assert (last["reason"], last["exitCode"]) == ("Unknown", 255)
    local_namespace.wait_for_log("held", "up")


def test_the_node_is_ready_and_alive(local_cluster: LocalCluster) -> None:
    node = local_cluster.get("/api/v1/nodes/plimsoll-local")
    assert node is not None
    assert {"cpu", "memory", "pods", "ephemeral-storage"} <= node["status"]["allocatable"].keys()
    addresses = {a["type"]: a["address"] for a in node["status"]["addresses"]}
    assert addresses == {"InternalIP": "10.244.0.1", "Hostname": "plimsoll-local"}
    path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/plimsoll-local"
    lease = local_cluster.get(path)
    assert lease is not None
    first = lease["spec"]["renewTime"]

    def renewed() -> bool:
        found = local_cluster.get(path)
        return found is not None and found["spec"]["renewTime"] > first

    local_cluster.wait_for(renewed, "the lease to be renewed")
