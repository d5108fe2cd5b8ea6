"""Every example is accepted by the real API server under strict validation, and can be built."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll_local.binaries import ensure_binaries
from plimsoll_operator import cluster as api
from plimsoll_operator import names
from plimsoll_operator.cluster import ApiError
from plimsoll_operator.desired.pod import build_pod_template
from plimsoll_operator.spec import Deployment
from support.apiserver import ApiServer
from support.promql import metric_names

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

FOLDER = Path(__file__).parents[2] / "manifests"
MANIFESTS = sorted(FOLDER.glob("llmdeployment*.yaml"))


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
async def test_an_example_is_accepted(server: ApiServer, manifest: Path) -> None:
    deployment = Deployment.parse(yaml.safe_load(_create(server, manifest)))
    template = build_pod_template(deployment, "engine")
    spec = template["spec"]
    (engine,) = [
        container
        for container in (*spec["containers"], *spec.get("initContainers", ()))
        if container["name"] == names.ENGINE_CONTAINER
    ]
    assert f"--tensor-parallel-size={deployment.tensor_parallel_size}" in engine["args"]


def _create(server: ApiServer, manifest: Path, *, dry_run: bool = True) -> str:
    """The object as the API server would store it, or with ``dry_run`` False stores it."""
    how = ["--dry-run=server"] if dry_run else []
    arguments = ("create", *how, "--validate=strict", "--output=yaml")
    return _kubectl(server, *arguments, f"--filename={manifest}")


def _kubectl(server: ApiServer, *arguments: str) -> str:
    done = subprocess.run(
        [ensure_binaries().kubectl, f"--namespace={server.namespace}", *arguments],
        env={**os.environ, "KUBECONFIG": os.fspath(server.kubeconfig)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# What a user asks for beyond the examples, one pod each.
PODS: dict[str, dict[str, Any]] = {
    "smallest": {"model": {"uri": "hf://org/tiny"}},
    "several ranks, weights of an image": {
        "model": {"uri": "oci://registry.example/tiny:1"},
        "parallelism": {"tensor": 4},
        "resources": {"limits": {"memory": "8Gi"}, "sharedMemory": "1Gi"},
    },
    "prefetched and compiled, stock vLLM": {
        "model": {
            "uri": "hf://org/tiny",
            "cache": {"claimName": "models", "prefetch": True, "compiled": True},
        },
        "runtime": {"name": "VLLM", "image": "vllm/vllm-openai:v0.11.0"},
    },
}


async def test_every_pod_passes_the_restricted_pod_security_standard(server: ApiServer) -> None:
    """By the API server's own admission, in a namespace that enforces it."""
    label = f"namespace/{server.namespace}", "pod-security.kubernetes.io/enforce=restricted"
    _kubectl(server, "label", *label)
    specs = {path.stem: yaml.safe_load(path.read_text())["spec"] for path in MANIFESTS} | PODS
    for spec in specs.values():
        await _try_pod(server, build_pod_template(_deployment(spec), "engine"))
    forbidden = {"model": {"uri": "hf://org/tiny", "cache": {"hostPath": "/data"}}}
    with pytest.raises(ApiError, match="restricted"):
        await _try_pod(server, build_pod_template(_deployment(forbidden), "engine"))


def _deployment(spec: dict[str, Any]) -> Deployment:
    metadata = {"name": "assistant", "namespace": "default", "uid": "u", "generation": 1}
    return Deployment.parse({"metadata": metadata, "spec": spec})


async def _try_pod(server: ApiServer, template: dict[str, Any]) -> None:
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "a-", **template["metadata"]},
        "spec": template["spec"],
    }
    query = [("dryRun", "All"), ("fieldValidation", "Strict")]
    await server._request("POST", api.POD.path(server.namespace), query=query, body=body)


async def test_the_horizontal_pod_autoscaler_scales_what_is_there(server: ApiServer) -> None:
    """Accepted, and its target has a scale subresource with a selector of pods."""
    stored = yaml.safe_load(_create(server, FOLDER / "hpa.yaml"))
    target = _target(stored["spec"]["scaleTargetRef"])
    _create(server, target, dry_run=False)
    (metric,) = stored["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == "vllm_num_requests_waiting"
    name = stored["spec"]["scaleTargetRef"]["name"]
    scale = _kubectl(server, "get", "llmdeployment", name, "--subresource=scale", "--output=yaml")
    assert yaml.safe_load(scale)["spec"]["replicas"] == 1


def test_the_scaled_object_of_keda_has_the_shape_that_keda_reads() -> None:
    """Its definition is not in the test's cluster, so only the fields are looked at, and the query;
    docs/verification.md says when it was last put to KEDA's own definition."""
    body = yaml.safe_load((FOLDER / "keda.yaml").read_text())
    assert (body["apiVersion"], body["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    spec = body["spec"]
    target = yaml.safe_load(_target(spec["scaleTargetRef"]).read_text())
    assert spec["minReplicaCount"] <= target["spec"]["replicas"] <= spec["maxReplicaCount"]
    (trigger,) = spec["triggers"]
    assert trigger["type"] == "prometheus"
    # KEDA takes texts alone there.
    assert all(isinstance(value, str) for value in trigger["metadata"].values())
    query = trigger["metadata"]["query"]
    assert metric_names(query) == {"plimsoll_pod:requests_waiting:sum"}
    alerts = yaml.safe_load((FOLDER.parent / "charts/plimsoll/files/alerts.yaml").read_text())
    recorded = {rule.get("record") for group in alerts["groups"] for rule in group["rules"]}
    assert metric_names(query) <= recorded
    assert f'plimsoll_dev_deployment="{target["metadata"]["name"]}"' in query


async def test_the_rendered_chart_is_accepted_as_it_is(server: ApiServer) -> None:
    """manifests/install.yaml, server-side as it says; its namespace is made first, since in a dry
    run nothing is there for what follows."""
    install = FOLDER / "install.yaml"
    namespace = "plimsoll-system"
    apply = ["apply", "--server-side", "--dry-run=server", "--validate=strict", "--output=name"]
    apply.append(f"--namespace={namespace}")
    if f"namespace/{namespace}" not in _kubectl(server, "get", "namespaces", "--output=name"):
        _kubectl(server, "create", "namespace", namespace)
    # The definitions are the test's own there.
    applied = _kubectl(server, *apply, "--force-conflicts", f"--filename={install}").split()
    bodies = [body for body in yaml.safe_load_all(install.read_text()) if body]
    assert len(applied) == len(bodies)
    kinds = {body["kind"] for body in bodies}
    assert {"CustomResourceDefinition", "ClusterRole", "Deployment", "Service"} <= kinds
    assert not kinds & {"PodMonitor", "PrometheusRule", "Pod"}


def _target(reference: dict[str, str]) -> Path:
    """The example that an autoscaler's reference means."""
    for manifest in MANIFESTS:
        body = yaml.safe_load(manifest.read_text())
        found = {key: body[key] for key in ("apiVersion", "kind")}
        if found | {"name": body["metadata"]["name"]} == reference:
            return manifest
    raise AssertionError(f"no example is {reference}")
