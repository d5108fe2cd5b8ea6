import json
from typing import Any

import pytest

from plimsoll_operator import names
from plimsoll_operator.desired import build_children
from plimsoll_operator.desired.metadata import fingerprint
from plimsoll_operator.desired.pod import build_pod_template
from plimsoll_operator.observed import Credentials
from plimsoll_operator.plan import Step, StepReason
from plimsoll_operator.tuning.values import Limits
from support.resources import deployment

Json = dict[str, Any]
IMAGE = "plimsoll/engine:0.1.0"
CREDENTIALS = Credentials(b"certificate", b"key", b"token")


def template(**spec: Any) -> Json:
    return build_pod_template(deployment(**spec), IMAGE)


def container(**spec: Any) -> Json:
    found: Json = template(**spec)["spec"]["containers"][0]
    return found


def environment(**spec: Any) -> dict[str, Json]:
    return {variable["name"]: variable for variable in container(**spec)["env"]}


NO_LIMITS = Limits()


def children(limits: Limits = NO_LIMITS, **spec: Any) -> dict[str, Json | None]:
    parsed = deployment(**spec)
    built = build_children(
        parsed,
        step=Step(replicas=parsed.replicas, partition=0, reason=StepReason.SETTLED),
        template=build_pod_template(parsed, IMAGE),
        credentials=CREDENTIALS,
        limits=limits,
        revision=3,
        operator_namespace="ops",
    )
    return {f"{kind} {name}": body for (kind, name), body in built.items()}


def present(**spec: Any) -> dict[str, Json]:
    return {name: body for name, body in children(**spec).items() if body is not None}


@pytest.mark.parametrize("parallelism", [{}, {"tensor": 4, "nodes": 2}])
def test_every_child_is_owned_and_labelled(parallelism: Json) -> None:
    for body in present(replicas=2, parallelism=parallelism).values():
        metadata = body["metadata"]
        assert metadata["ownerReferences"][0]["uid"] == "uid-assistant"
        assert metadata["ownerReferences"][0]["controller"] is True
        assert metadata["labels"][names.DEPLOYMENT_LABEL] == "assistant"
        assert "finalizers" not in metadata


def test_what_a_pod_mounts_is_applied_before_the_pods() -> None:
    assert list(present(replicas=2)) == [
        "Secret assistant-control",
        "ConfigMap assistant-limits",
        "Service assistant-pods",
        "Service assistant",
        "PodDisruptionBudget assistant",
        "NetworkPolicy assistant",
        "StatefulSet assistant",
    ]


def test_the_tuner_never_reaches_the_pod_template() -> None:
    def template_hash(limits: Limits) -> str:
        body = children(limits)["StatefulSet assistant"]
        assert body is not None
        return fingerprint(body["spec"]["template"])

    loose, tight = Limits(max_model_len=8192), Limits(1024, 0.5, 2, 256, 0.1)
    assert template_hash(loose) == template_hash(tight)
    assert (
        children(loose)["ConfigMap assistant-limits"]
        != children(tight)["ConfigMap assistant-limits"]
    )


def test_the_limits_file_holds_the_limits_in_force_and_leaves_out_the_others() -> None:
    body = children(Limits(max_model_len=4096, gpu_memory_utilization=0.85))[
        "ConfigMap assistant-limits"
    ]
    assert body is not None
    assert json.loads(body["data"]["limits.json"]) == {
        "revision": 3,
        "limits": {"maxModelLen": 4096, "gpuMemoryUtilization": 0.85},
    }


def test_scaling_changes_the_count_and_not_the_template() -> None:
    one, two = children(replicas=1), children(replicas=2)
    first, second = one["StatefulSet assistant"], two["StatefulSet assistant"]
    assert first is not None
    assert second is not None
    assert (first["spec"]["replicas"], second["spec"]["replicas"]) == (1, 2)
    assert first["spec"]["template"] == second["spec"]["template"]


def test_a_single_replica_has_no_disruption_budget() -> None:
    assert children(replicas=1)["PodDisruptionBudget assistant"] is None
    budget = children(replicas=2)["PodDisruptionBudget assistant"]
    assert budget is not None
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert budget["spec"]["maxUnavailable"] == 1


def test_the_control_port_is_the_operators_and_every_other_is_open() -> None:
    policy = children()["NetworkPolicy assistant"]
    assert policy is not None
    spec, labels = policy["spec"], template()["metadata"]["labels"]
    assert spec["podSelector"]["matchLabels"].items() <= labels.items()
    assert spec["policyTypes"] == ["Ingress"]
    (control,) = (rule for rule in spec["ingress"] if "from" in rule)
    assert control["ports"] == [{"port": names.CONTROL_PORT, "protocol": "TCP"}]
    (peer,) = control["from"]
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "ops"}
    assert peer["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "plimsoll-operator"}
    (others,) = (rule for rule in spec["ingress"] if "from" not in rule)
    open_ports = {
        port
        for entry in others["ports"]
        if entry["protocol"] == "TCP"
        for port in range(entry["port"], entry.get("endPort", entry["port"]) + 1)
    }
    assert open_ports == set(range(1, 65536)) - {names.CONTROL_PORT}


def test_an_operator_outside_of_the_cluster_makes_no_network_policy() -> None:
    parsed = deployment()
    built = build_children(
        parsed,
        step=Step(replicas=1, partition=0, reason=StepReason.SETTLED),
        template=build_pod_template(parsed, IMAGE),
        credentials=CREDENTIALS,
        limits=NO_LIMITS,
        revision=3,
    )
    assert built["NetworkPolicy", "assistant"] is None


def test_the_service_sends_port_80_to_the_engines_http_port() -> None:
    service, headless = children()["Service assistant"], children()["Service assistant-pods"]
    pod = template()
    assert service is not None
    assert headless is not None
    assert service["spec"]["ports"][0]["port"] == 80
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    ports = {port["name"] for port in container()["ports"]}
    assert {port["targetPort"] for port in headless["spec"]["ports"]} == ports
    assert headless["spec"]["clusterIP"] == "None"
    statefulset = children()["StatefulSet assistant"]
    assert statefulset is not None
    assert statefulset["spec"]["serviceName"] == headless["metadata"]["name"]


def test_the_flags_follow_the_spec() -> None:
    args = container(
        model={"uri": "hf://org/tiny", "revision": "v1", "servedName": "chat"},
        parallelism={"tensor": 3},
        engine={
            "blockSize": 32,
            "gpuMemoryUtilization": 0.85,
            "maxModelLen": 4096,
            "maxNumSeqs": 8,
            "maxNumBatchedTokens": 512,
            "extraArgs": ["--dtype", "float32"],
        },
        tuning={"maxModelLen": {"minAllowed": 1024, "maxAllowed": 8192}},
        drain="90s",
    )["args"]

    assert args[-2:] == ["--dtype", "float32"]
    flags = dict(arg.split("=", 1) for arg in args[:-2])
    assert flags["--model"] == "org/tiny"
    assert flags["--revision"] == "v1"
    assert flags["--served-model-name"] == "chat"
    assert flags["--device"] == "cpu"
    assert flags["--tensor-parallel-size"] == "3"
    assert flags["--block-size"] == "32"
    assert flags["--gpu-memory-utilization"] == "0.85"
    assert flags["--max-model-len"] == "8192", "the ceiling, not the starting length"
    assert flags["--max-num-seqs"] == "8"
    assert flags["--max-num-batched-tokens"] == "512"
    assert flags["--shutdown-timeout"] == "90"


def test_no_length_means_the_largest_that_fits() -> None:
    assert "--max-model-len=auto" in container()["args"]


def test_a_file_uri_is_an_absolute_path() -> None:
    assert "--model=/opt/m" in container(model={"uri": "file:///opt/m"})["args"]


# Case B22: whatever the node calls its accelerator.
@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "nvidia.com/mig-3g.71gb", "amd.com/gpu"])
def test_accelerators_are_requested_by_the_name_given(resource: str) -> None:
    resources = container(
        parallelism={"tensor": 2},
        accelerator={"resourceName": resource},
        resources={"limits": {"memory": "8Gi"}, "requests": {"cpu": 2}},
    )["resources"]

    assert resources == {
        "limits": {"memory": "8Gi", resource: "2"},
        "requests": {"cpu": "2", resource: "2"},
    }


def test_on_cpu_there_is_no_accelerator_entry() -> None:
    built = container(resources={"limits": {"memory": "2Gi", "cpu": "1"}})
    assert built["resources"] == {"limits": {"memory": "2Gi", "cpu": "1"}}
    assert "--device=cpu" in built["args"]
    assert "--device=cuda" in container(accelerator={"resourceName": "amd.com/gpu"})["args"]


# Case B22: placement is passed through unchanged.
def test_placement_passes_through() -> None:
    tolerations = [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {
            "key": "burst",
            "operator": "Equal",
            "value": "true",
            "effect": "NoExecute",
            "tolerationSeconds": 60,
        },
    ]
    affinity: Json = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    spec = template(
        podTemplate={
            "nodeSelector": {"pool": "h200"},
            "tolerations": tolerations,
            "affinity": affinity,
        }
    )["spec"]

    assert spec["nodeSelector"] == {"pool": "h200"}
    assert spec["tolerations"] == tolerations
    assert spec["affinity"] == affinity


def test_users_labels_never_replace_the_selector() -> None:
    metadata = template(
        podTemplate={
            "labels": {"team": "a", "app.kubernetes.io/name": "other"},
            "annotations": {"note": "x"},
        }
    )["metadata"]

    assert metadata["labels"]["team"] == "a"
    assert metadata["labels"]["app.kubernetes.io/name"] == "plimsoll-engine"
    assert metadata["annotations"] == {"note": "x"}


def test_the_environment_tells_the_engine_its_name_and_limits() -> None:
    variables = environment()
    assert variables["POD_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    assert (
        variables["PLIMSOLL_MEMORY_LIMIT"]["valueFrom"]["resourceFieldRef"]["resource"]
        == "limits.memory"
    )
    assert variables["OMP_NUM_THREADS"]["valueFrom"]["resourceFieldRef"]["resource"] == "limits.cpu"
    assert "OMP_NUM_THREADS" not in environment(accelerator={"resourceName": "nvidia.com/gpu"})


def test_secrets_reach_the_engine_by_reference() -> None:
    variables = environment(
        model={"uri": "hf://org/tiny", "tokenSecretRef": {"name": "hf", "key": "token"}},
        apiKeySecretRef={"name": "api", "key": "k"},
    )
    assert variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hf", "key": "token"}
    assert variables["PLIMSOLL_API_KEY"]["valueFrom"]["secretKeyRef"] == {"name": "api", "key": "k"}


def test_a_users_variable_replaces_ours() -> None:
    variables = environment(
        podTemplate={"env": [{"name": "HF_HOME", "value": "/x"}, {"name": "DEBUG", "value": "1"}]}
    )
    assert variables["HF_HOME"] == {"name": "HF_HOME", "value": "/x"}
    assert variables["DEBUG"] == {"name": "DEBUG", "value": "1"}


def test_every_writable_path_lies_under_a_mount() -> None:
    spec = template()["spec"]
    mounts = [
        mount["mountPath"]
        for mount in spec["containers"][0]["volumeMounts"]
        if not mount.get("readOnly")
    ]
    variables = environment()
    for name in ("HOME", "HF_HOME", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "TMPDIR"):
        path = variables[name]["value"]
        assert any(f"{path}/".startswith(f"{mount}/") for mount in mounts), name
    assert {volume["name"] for volume in spec["volumes"]} == {
        mount["name"] for mount in spec["containers"][0]["volumeMounts"]
    }


def test_ranks_share_memory_only_where_there_are_several() -> None:
    def shared_memory(tensor: int) -> list[Json]:
        volumes = template(parallelism={"tensor": tensor})["spec"]["volumes"]
        return [volume for volume in volumes if volume["name"] == "shm"]

    assert shared_memory(1) == []
    assert shared_memory(2) == [{"name": "shm", "emptyDir": {"medium": "Memory"}}]


def test_models_come_from_the_cache_claim_or_a_claim_of_their_own() -> None:
    def volume(name: str, **model: Any) -> Json:
        volumes = template(model=model)["spec"]["volumes"]
        found: Json = next(v for v in volumes if v["name"] == name)
        return found

    cached = volume("models", uri="hf://org/tiny", cache={"claimName": "models"})
    assert cached["persistentVolumeClaim"] == {"claimName": "models"}
    assert volume("models", uri="hf://org/tiny")["emptyDir"] == {}
    claimed = volume("model", uri="pvc://weights/a")
    assert claimed["persistentVolumeClaim"] == {"claimName": "weights", "readOnly": True}


def test_the_grace_period_leaves_time_for_the_drain() -> None:
    spec = template(drain="90s")["spec"]
    prestop = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] > 90 + prestop


def test_loading_is_bounded_by_the_startup_probe_alone() -> None:
    built = container()
    startup = built["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 3600
    assert built["livenessProbe"]["timeoutSeconds"] >= 5
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert built[probe]["httpGet"]["path"] == "/health"
    assert built["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_the_security_context_is_restricted_and_can_be_changed() -> None:
    spec = template()["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    changed = template(
        podTemplate={
            "securityContext": {"runAsUser": 1000},
            "containerSecurityContext": {"readOnlyRootFilesystem": False},
        }
    )["spec"]
    assert changed["securityContext"]["runAsUser"] == 1000
    assert changed["securityContext"]["runAsNonRoot"] is True
    assert changed["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is False


def test_the_spec_may_name_the_image() -> None:
    assert container()["image"] == IMAGE
    assert container(runtime={"image": "mine:1"})["image"] == "mine:1"
