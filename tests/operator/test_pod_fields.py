"""Fields of the pod that came after 0.1.0: each changes the pod where it is set, and nowhere else."""

from typing import Any

import pytest

from plimsoll_operator.desired.merge import merged
from plimsoll_operator.desired.pod import build_pod_template
from plimsoll_operator.spec import InvalidSpec
from support.resources import deployment

Json = dict[str, Any]


def pod(**spec: Any) -> Json:
    found: Json = build_pod_template(deployment(**spec), "engine")["spec"]
    return found


def by_name(entries: list[Json], key: str = "name") -> dict[str, Json]:
    return {entry[key]: entry for entry in entries}


def engine(spec: Json) -> Json:
    return by_name([*spec["containers"], *spec.get("initContainers", [])])["engine"]


def test_an_image_of_weights_is_a_read_only_volume() -> None:
    spec = pod(model={"uri": "oci://registry.example/models/tiny:1", "path": "fp16"})
    volume = by_name(spec["volumes"])["model"]
    assert volume["image"] == {"reference": "registry.example/models/tiny:1"}
    mount = by_name(engine(spec)["volumeMounts"])["model"]
    assert (mount["mountPath"], mount["readOnly"]) == ("/model", True)
    assert "--model=/model/fp16" in engine(spec)["args"]
    assert "--served-model-name=assistant" in engine(spec)["args"]


def test_a_node_folder_can_be_the_cache() -> None:
    spec = pod(model={"uri": "hf://org/tiny", "cache": {"hostPath": "/data/models"}})
    assert by_name(spec["volumes"])["models"]["hostPath"] == {
        "path": "/data/models",
        "type": "DirectoryOrCreate",
    }


@pytest.mark.parametrize("runtime", ["Plimsoll", "VLLM"])
def test_what_is_compiled_is_kept_beside_prefetched_weights_that_cannot_be_written(
    runtime: str,
) -> None:
    cache = {"claimName": "models", "prefetch": True, "compiled": True}
    spec = pod(
        model={"uri": "hf://org/tiny", "cache": cache},
        runtime={"name": runtime, "image": "vllm/vllm-openai:v0.11.0"},
    )
    mounts = by_name(engine(spec)["volumeMounts"], "mountPath")
    assert mounts["/models"] == {"name": "models", "mountPath": "/models", "readOnly": True}
    assert mounts["/compiled"] == {
        "name": "models",
        "mountPath": "/compiled",
        "subPath": "plimsoll-compiled",
    }
    env = {variable["name"]: variable.get("value", "") for variable in engine(spec)["env"]}
    kept = {name for name, path in env.items() if path.startswith("/compiled/")}
    wanted = {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"}
    assert kept == (wanted | {"VLLM_CACHE_ROOT"} if runtime == "VLLM" else wanted)
    assert env["HF_HUB_OFFLINE"] == "1"
    # What is written all the same lies elsewhere.
    assert env["HF_MODULES_CACHE"].startswith("/scratch/")


def test_shared_memory_has_a_size_within_the_limit_that_it_counts_in() -> None:
    limits = {"memory": "8Gi"}
    spec = pod(resources={"limits": limits, "sharedMemory": "2Gi"})
    assert by_name(spec["volumes"])["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert "sharedMemory" not in engine(spec)["resources"]
    with pytest.raises(InvalidSpec, match=r"sharedMemory is 8192Mi; allowed: less than .* \(8Gi\)"):
        pod(resources={"limits": limits, "sharedMemory": "8192Mi"})


@pytest.mark.parametrize(("runtime", "period"), [("Plimsoll", 2), ("VLLM", 5)])
def test_the_start_up_probe_has_the_time_that_the_model_needs(runtime: str, period: int) -> None:
    spec = pod(
        model={"uri": "hf://org/tiny", "startupTimeout": "2h"},
        runtime={"name": runtime, "image": "vllm/vllm-openai:v0.11.0"},
    )
    probe = engine(spec)["startupProbe"]
    assert (probe["periodSeconds"], probe["failureThreshold"]) == (period, 7200 // period)


def test_a_patch_is_merged_as_kubectl_does_it() -> None:
    spec = pod(
        podTemplate={
            "patch": {
                "hostNetwork": True,
                "securityContext": {"fsGroup": 7, "seccompProfile": None},
                "volumes": [
                    {"name": "models", "csi": {"driver": "models.example"}},
                    {"name": "extra", "configMap": {"name": "extra"}},
                ],
                "containers": [
                    {
                        "name": "engine",
                        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
                        "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
                    },
                    {"name": "sidecar", "image": "sidecar:1"},
                ],
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
            }
        }
    )
    plain = pod()
    assert spec["hostNetwork"] is True
    assert spec["securityContext"]["fsGroup"] == 7
    assert "seccompProfile" not in spec["securityContext"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    volumes = by_name(spec["volumes"])
    # A volume has one source: ours makes way for the user's.
    assert volumes["models"] == {"name": "models", "csi": {"driver": "models.example"}}
    assert set(volumes) == {*by_name(plain["volumes"]), "extra"}
    assert [container["name"] for container in spec["containers"]] == ["engine", "sidecar"]
    assert engine(spec)["env"] == [
        *engine(plain)["env"],
        {"name": "NCCL_DEBUG", "value": "INFO"},
    ]
    assert engine(spec)["args"] == engine(plain)["args"]
    assert engine(spec)["volumeMounts"][-1]["mountPath"] == "/extra"


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        ({"containers": [{"image": "x"}]}, r"patch\.containers\[0\] is .* the field name"),
        ({"volumes": ["x"]}, r"patch\.volumes\[0\] is x; allowed: an object"),
        ({"$patch": "replace"}, r"patch is \$patch; .* not supported"),
    ],
)
def test_a_patch_that_cannot_be_merged_is_refused_by_its_place(patch: Json, words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        merged({}, patch)


def test_merging_changes_neither_side() -> None:
    base: Json = {"a": {"b": 1}, "env": [{"name": "x", "value": "1"}]}
    patch: Json = {"a": {"c": 2}, "env": [{"name": "x", "value": "2"}]}
    assert merged(base, patch) == {"a": {"b": 1, "c": 2}, "env": [{"name": "x", "value": "2"}]}
    assert base == {"a": {"b": 1}, "env": [{"name": "x", "value": "1"}]}
    assert patch == {"a": {"c": 2}, "env": [{"name": "x", "value": "2"}]}
