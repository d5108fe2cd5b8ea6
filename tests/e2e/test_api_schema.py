"""The API server refuses a bad resource with the field, the value and what is allowed."""

import copy
from typing import Any

import pytest

from plimsoll_operator import cluster as api
from plimsoll_operator.cluster import ApiError
from support.apiserver import ApiServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

Json = dict[str, Any]
GOOD: Json = {"model": {"uri": "hf://org/tiny"}}


def both(*changes: tuple[str, object]) -> Json:
    """GOOD with values set at dotted paths."""
    spec = copy.deepcopy(GOOD)
    for path, value in changes:
        *parents, last = path.split(".")
        place = spec
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return spec


def changed(path: str, value: object) -> Json:
    return both((path, value))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({}, ["spec.model", "Required value"]),
        (
            changed("parallelism", {"tensor": 8, "nodes": 3}),
            ["spec.parallelism.nodes is 3", "a divisor of tensor times pipeline, which is 8"],
        ),
        (
            changed("parallelism", {"tensor": 4, "pipeline": 2}),
            ["spec.parallelism.pipeline is 2", "1, or spec.runtime.name VLLM"],
        ),
        (changed("model.uri", "oci://a b"), ["spec.model.uri is oci://a b", "hf://org/name"]),
        (changed("model.path", "fp16"), ["spec.model.path is fp16", "only with an oci:// uri"]),
        (
            changed("model", {"uri": "oci://a/b:1", "path": "../etc"}),
            ["spec.model.path is ../etc", "without .."],
        ),
        (
            changed("model.cache", {"claimName": "a", "hostPath": "/b"}),
            ["both or none of claimName and hostPath"],
        ),
        (
            changed("model.cache", {"hostPath": "/b", "prefetch": True}),
            ["spec.model.cache.prefetch is true", "only with claimName"],
        ),
        (
            changed("model", {"uri": "pvc://a/b", "cache": {"claimName": "a", "prefetch": True}}),
            ["prefetch is true", "only with an hf:// uri, not pvc://a/b"],
        ),
        (
            changed("model.startupTimeout", "25h"),
            ["spec.model.startupTimeout is 25h", "from 1m to 24h"],
        ),
        (changed("model.uri", "org/tiny"), ["spec.model.uri is org/tiny", "pvc://claim/path"]),
        (changed("model.uri", "hf://tiny"), ["spec.model.uri is hf://tiny", "hf://org/name"]),
        (
            changed("model.uri", "pvc://claim"),
            ["spec.model.uri is pvc://claim", "pvc://claim/path"],
        ),
        (changed("model.uri", "pvc://c/a/../b"), ["pvc://c/a/../b", "a path without .."]),
        (
            both(("model.uri", "file:///m"), ("model.revision", "v1")),
            ["spec.model.revision is v1", "only with an hf:// uri"],
        ),
        (changed("runtime", {"name": "VLLM"}), ["spec.runtime.image is not set", "vllm-openai"]),
        (
            changed("runtime", {"name": "VLLM", "image": "v", "version": "0.7.3"}),
            ["spec.runtime.version is 0.7.3", "from 0.8.0 on"],
        ),
        (
            changed("runtime", {"version": "0.11.0"}),
            ["spec.runtime.version is 0.11.0", "only with spec.runtime.name VLLM"],
        ),
        (
            both(
                ("runtime", {"name": "VLLM", "image": "v:v0.11.0"}),
                ("engine.extraArgs", ["--dtype=half", "--ssl-keyfile=/k"]),
            ),
            ["spec.engine.extraArgs holds --ssl-keyfile=/k", "allowed with"],
        ),
        (changed("replicas", -1), ["spec.replicas", "-1", "greater than or equal to 0"]),
        (changed("parallelism.tensor", 0), ["spec.parallelism.tensor", "0", "or equal to 1"]),
        (changed("parallelism.tensor", 65), ["spec.parallelism.tensor", "65", "or equal to 64"]),
        (changed("accelerator.resourceName", "gpu"), ["resourceName is gpu", "nvidia.com/gpu"]),
        (changed("engine.blockSize", 20), ["spec.engine.blockSize", "20", "multiple of 16"]),
        (changed("engine.blockSize", 0), ["spec.engine.blockSize", "0", "or equal to 16"]),
        (
            changed("engine.gpuMemoryUtilization", 1.1),
            ["spec.engine.gpuMemoryUtilization is 1.1", "from 0.05 to 1"],
        ),
        (
            changed("engine.gpuMemoryUtilization", 0.01),
            ["spec.engine.gpuMemoryUtilization is 0.01", "from 0.05 to 1"],
        ),
        (
            changed("engine.gpuMemoryUtilization", 0),
            ["spec.engine.gpuMemoryUtilization is 0", "from 0.05 to 1"],
        ),
        (
            changed("tuning.gpuMemoryUtilization.minAllowed", 0),
            ["spec.tuning.gpuMemoryUtilization.minAllowed is 0", "from 0.05 to 1"],
        ),
        # The default start counts like a written one.
        (
            changed("tuning.gpuMemoryUtilization.minAllowed", 0.95),
            ["spec.engine.gpuMemoryUtilization is 0.9", "at least", "0.95"],
        ),
        (
            changed("tuning.gpuMemoryUtilization.maxAllowed", 0.7),
            ["spec.engine.gpuMemoryUtilization is 0.9", "at most", "0.7"],
        ),
        (changed("engine.maxModelLen", 0), ["spec.engine.maxModelLen", "0", "or equal to 1"]),
        (changed("engine.maxNumSeqs", 0), ["spec.engine.maxNumSeqs", "0", "or equal to 1"]),
        (
            changed("engine.extraArgs", ["--dtype=float32", "--port=1"]),
            ["spec.engine.extraArgs holds --port=1", "no other field"],
        ),
        (changed("runtime.name", "vLLM"), ["spec.runtime.name", '"vLLM"', '"VLLM"', '"Plimsoll"']),
        (changed("tuning.mode", "On"), ["spec.tuning.mode", "On", "Off", "Advise", "Auto"]),
        (
            changed("tuning.gpuMemoryUtilization", {"minAllowed": 0.9, "maxAllowed": 0.8}),
            ["spec.tuning.gpuMemoryUtilization.minAllowed is 0.9", "at most maxAllowed", "0.8"],
        ),
        (
            changed("tuning.maxModelLen", {"minAllowed": 4096, "maxAllowed": 2048}),
            ["spec.tuning.maxModelLen.minAllowed is 4096", "at most maxAllowed", "2048"],
        ),
        (
            both(("tuning.maxModelLen", {"minAllowed": 4096}), ("engine.maxModelLen", 2048)),
            ["spec.engine.maxModelLen is 2048", "at least", "minAllowed", "4096"],
        ),
        (
            both(
                ("tuning.gpuMemoryUtilization", {"minAllowed": 0.8, "maxAllowed": 0.9}),
                ("engine.gpuMemoryUtilization", 0.7),
            ),
            ["spec.engine.gpuMemoryUtilization is 0.7", "at least", "0.8"],
        ),
        (
            both(
                ("tuning.gpuMemoryUtilization", {"minAllowed": 0.8, "maxAllowed": 0.9}),
                ("engine.gpuMemoryUtilization", 0.95),
            ),
            ["spec.engine.gpuMemoryUtilization is 0.95", "at most", "0.9"],
        ),
        (changed("tuning.maxRestartsPerDay", -1), ["maxRestartsPerDay", "-1", "or equal to 0"]),
        (
            changed("tuning.objectives.timeToFirstToken", "2"),
            ["spec.tuning.objectives.timeToFirstToken is 2", "a duration"],
        ),
        (
            changed("tuning.objectives.timePerOutputToken", "fast"),
            ["spec.tuning.objectives.timePerOutputToken is fast", "a duration"],
        ),
        (changed("rollout.type", "Recreate"), ["spec.rollout.type", "Recreate", "SurgeFirst"]),
        (changed("rollout.canary", "Maybe"), ["spec.rollout.canary", "Maybe", "Probe"]),
        (changed("rollout.soak", "2h"), ["spec.rollout.soak is 2h", "0s to 1h"]),
        (changed("rollout.progressDeadline", "0s"), ["progressDeadline is 0s", "1s to 24h"]),
        (changed("drain", "60"), ["spec.drain is 60", "0s to 1h"]),
        (changed("drain", "2h"), ["spec.drain is 2h", "0s to 1h"]),
        (changed("drain", "9" * 20 + "h"), ["spec.drain is 999", "0s to 1h"]),
        (changed("drain", "99999h" * 5), ["spec.drain is 999", "0s to 1h"]),
        (
            changed("tuning.objectives.timeToFirstToken", "99999h"),
            ["spec.tuning.objectives.timeToFirstToken is 99999h", "1ms to 1h"],
        ),
        (changed("monitoring.scrapeInterval", "1ms"), ["scrapeInterval is 1ms", "1s to 5m"]),
        (
            changed("resources.limits", {"nvidia.com/gpu": 1}),
            ["spec.resources.limits names nvidia.com/gpu", "follows from spec.parallelism"],
        ),
        (
            both(
                ("accelerator.resourceName", "amd.com/gpu"),
                ("resources.requests", {"amd.com/gpu": 1}),
            ),
            ["spec.resources.requests names amd.com/gpu", "follows from spec.parallelism"],
        ),
        (changed("resources.limits", {"memory": "lots"}), ["spec.resources.limits", "lots"]),
        (changed("resources.limits", {"memory": -5}), ["spec.resources.limits", "at least 0"]),
    ],
)
async def test_a_bad_value_is_refused_in_words_that_help(
    server: ApiServer, spec: Json, said: list[str]
) -> None:
    with pytest.raises(ApiError) as refusal:
        await server.apply_deployment(spec, manager="kubectl")

    assert refusal.value.status == 422
    for words in said:
        assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "nodes", "said"),
    [
        ("a" * 53, 1, ["53 characters", "at most 52"]),
        ("a" * 43, 2, ["43 characters", "allowed with spec.parallelism.nodes: at most 42"]),
        ("3b", 1, ["metadata.name is 3b", "starting with a letter"]),
        ("qwen.3", 1, ["metadata.name is qwen.3", "lower-case letters, digits and -"]),
    ],
)
async def test_a_name_that_no_child_could_bear_is_refused(
    server: ApiServer, name: str, nodes: int, said: list[str]
) -> None:
    with pytest.raises(ApiError) as refusal:
        await server.create_deployment(name, parallelism={"tensor": 2, "nodes": nodes})
    for words in said:
        assert words in str(refusal.value)
    await server.create_deployment("a" * 52)


async def test_an_unknown_field_is_refused_under_strict_validation_and_pruned_otherwise(
    server: ApiServer,
) -> None:
    body = {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "assistant"},
        "spec": {**GOOD, "gpuMemoryUtilisation": 0.9},
    }
    path = api.LLM_DEPLOYMENT.path(server.namespace)
    with pytest.raises(ApiError, match=r"unknown field .*gpuMemoryUtilisation"):
        await server._request("POST", path, query=[("fieldValidation", "Strict")], body=body)
    stored = await server._request("POST", path, query=[("fieldValidation", "Ignore")], body=body)
    assert stored["spec"] == {**GOOD, "replicas": 1}


async def test_the_whole_documented_spec_is_accepted(server: ApiServer) -> None:
    await server.apply_deployment(
        {
            "model": {
                "uri": "hf://Qwen/Qwen3-8B",
                "revision": "main",
                "servedName": "assistant",
                "tokenSecretRef": {"name": "hf", "key": "token"},
                "cache": {"claimName": "models", "prefetch": True, "compiled": True},
                "startupTimeout": "20m",
            },
            "runtime": {"name": "Plimsoll", "image": "mine:1", "imagePullPolicy": "Never"},
            "replicas": 2,
            "parallelism": {"tensor": 4},
            "accelerator": {"resourceName": "nvidia.com/mig-3g.71gb"},
            "engine": {
                "blockSize": 16,
                "gpuMemoryUtilization": 0.90,
                "maxModelLen": 32768,
                "maxNumSeqs": 256,
                "maxNumBatchedTokens": 2048,
                "extraArgs": ["--dtype", "bfloat16"],
            },
            "tuning": {
                "mode": "Auto",
                "gpuMemoryUtilization": {"minAllowed": 0.80, "maxAllowed": 0.94},
                "maxModelLen": {"minAllowed": 8192, "maxAllowed": 32768},
                "maxRestartsPerDay": 4,
                "objectives": {"timeToFirstToken": "2s", "timePerOutputToken": "200ms"},
            },
            "rollout": {
                "type": "Auto",
                "canary": "Probe",
                "soak": "2m",
                "progressDeadline": "30m",
            },
            "drain": "60s",
            "resources": {
                "limits": {"memory": "8Gi", "cpu": 2},
                "requests": {"cpu": "500m"},
                "sharedMemory": "1Gi",
            },
            "podTemplate": {
                "labels": {"team": "a"},
                "annotations": {"note": "x"},
                "nodeSelector": {"pool": "h200"},
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                "affinity": {"podAntiAffinity": {}},
                "topologySpreadConstraints": [],
                "priorityClassName": "high",
                "serviceAccountName": "engine",
                "imagePullSecrets": [{"name": "registry"}],
                "securityContext": {"runAsUser": 1000},
                "containerSecurityContext": {"readOnlyRootFilesystem": False},
                "env": [{"name": "A", "value": "b"}],
                "patch": {"volumes": [{"name": "extra", "emptyDir": {}}]},
            },
            "apiKeySecretRef": {"name": "api", "key": "key"},
            "monitoring": {"scrapeInterval": "5s"},
        },
        manager="kubectl",
    )


async def test_a_memory_profile_never_changes_what_it_is_about(server: ApiServer) -> None:
    spec = {
        "model": "hf://org/tiny",
        "revision": "main",
        "dtype": "auto",
        "device": "cpu 2Gi",
        "tensorParallelSize": 1,
        "engine": "plimsoll/engine:0.1.0",
    }
    profile = {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "MemoryProfile",
        "metadata": {"name": "tiny", "namespace": server.namespace},
        "spec": spec,
    }
    await server.apply(profile)
    with pytest.raises(ApiError, match="spec is immutable"):
        await server.apply({**profile, "spec": {**spec, "device": "cpu 4Gi"}})
