"""What a pod on a whole local cluster finds in its files and its environment, and what it waits for."""

from __future__ import annotations

import json

import pytest

from support.agent_pods import pod, python, shell
from support.local_cluster import Json, LocalNamespace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


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
