"""Runtime VLLM: what its pods are made of, and what the tuner may move there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plimsoll_operator import runtimes
from plimsoll_operator.desired.pod import build_pod_template
from plimsoll_operator.pods import read_pod
from plimsoll_operator.runtimes.vllm_flags import read_version
from plimsoll_operator.spec import RuntimeName, TuningMode
from plimsoll_operator.tuning.settings import tuning_settings
from plimsoll_operator.tuning.values import FailureClass, Limits, Parameter, Status
from support.resources import deployment, pod_body
from support.tuning import Fleet, died, holds, verdict, with_lane

Json = dict[str, Any]
IMAGE = "vllm/vllm-openai:v0.11.0"
RUNTIME = {"name": "VLLM", "image": IMAGE}
OURS = "plimsoll/engine:0.1.0"


def pod_spec(**spec: Any) -> Json:
    wanted = deployment(**{"runtime": RUNTIME, **spec})
    found: Json = build_pod_template(wanted, OURS)["spec"]
    return found


def vllm_flags(**spec: Any) -> list[str]:
    (engine,) = pod_spec(**spec)["initContainers"]
    flags: list[str] = engine["args"]
    return flags


def test_the_gate_is_ours_and_the_engine_the_users() -> None:
    spec = pod_spec(imagePullPolicy="Always")
    (engine,), (gate,) = spec["initContainers"], spec["containers"]
    assert (engine["image"], gate["image"]) == (IMAGE, OURS)
    # The gate drains before vLLM is asked to stop: vLLM is the sidecar.
    assert engine["restartPolicy"] == "Always"
    assert "restartPolicy" not in gate
    assert gate["command"] == ["python", "-m", "plimsoll_engine.gate"]


def test_nobody_reaches_vllm_but_the_gate() -> None:
    spec = pod_spec()
    (engine,), (gate,) = spec["initContainers"], spec["containers"]
    assert "--host=127.0.0.1" in engine["args"]
    assert "ports" not in engine
    (port,) = [flag for flag in engine["args"] if flag.startswith("--port=")]
    assert f"--upstream=http://127.0.0.1:{port.partition('=')[2]}" in gate["args"]
    assert {port["name"]: port["containerPort"] for port in gate["ports"]} == {
        "http": 8000,
        "control": 8001,
    }
    mounted = {each["name"] for each in engine["volumeMounts"]}
    assert not mounted & {"control", "limits"}
    # Also for one rank: vLLM's processes speak through shared memory.
    assert "shm" in mounted
    assert {each["name"] for each in gate["volumeMounts"]} == {"control", "limits"}


def test_probes_ask_what_each_can_be_blamed_for() -> None:
    spec = pod_spec()
    (engine,), (gate,) = spec["initContainers"], spec["containers"]
    assert gate["livenessProbe"]["httpGet"]["path"] == "/gate/health"
    assert gate["readinessProbe"]["httpGet"]["path"] == "/health"
    assert (
        engine["startupProbe"]["periodSeconds"] * engine["startupProbe"]["failureThreshold"] == 3600
    )
    for probe in ("startupProbe", "livenessProbe"):
        # The kubelet is not on the pod's loopback address.
        assert "httpGet" not in engine[probe]
        assert ":8002/health" in engine[probe]["exec"]["command"][-1]


def test_accelerators_and_secrets_go_where_they_belong() -> None:
    spec = pod_spec(
        accelerator={"resourceName": "nvidia.com/gpu"},
        parallelism={"tensor": 2},
        apiKeySecretRef={"name": "s", "key": "k"},
        resources={"limits": {"memory": "80Gi"}},
        podTemplate={
            "env": [{"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"}],
            "containerSecurityContext": {"readOnlyRootFilesystem": False},
        },
    )
    (engine,), (gate,) = spec["initContainers"], spec["containers"]
    assert engine["resources"]["limits"] == {"memory": "80Gi", "nvidia.com/gpu": "2"}
    assert "nvidia.com/gpu" not in gate["resources"]["limits"]
    keys = {each["name"]: each.get("valueFrom") for each in engine["env"]}
    assert keys["VLLM_API_KEY"] == {"secretKeyRef": {"name": "s", "key": "k"}}
    assert "VLLM_LOGGING_LEVEL" in keys
    assert [each["name"] for each in gate["env"]] == ["PLIMSOLL_API_KEY"]
    assert engine["securityContext"]["readOnlyRootFilesystem"] is False
    assert gate["securityContext"]["readOnlyRootFilesystem"] is True


def test_both_have_the_same_ceiling_and_the_gate_the_same_width() -> None:
    spec = pod_spec(
        engine={"maxModelLen": 4096, "maxNumSeqs": 32},
        tuning={"maxModelLen": {"maxAllowed": 8192}},
        drain="90s",
    )
    (engine,), (gate,) = spec["initContainers"], spec["containers"]
    for flag in ("--max-model-len=8192", "--max-num-seqs=32"):
        assert flag in engine["args"]
        assert flag in gate["args"]
    assert "--shutdown-timeout=90" in gate["args"]
    assert spec["terminationGracePeriodSeconds"] > 90


@pytest.mark.parametrize(
    ("version", "with_length", "quiet"),
    [
        ("0.8.5", False, True),
        ("0.10.0", False, True),
        ("0.10.1", False, False),
        ("0.13.0", False, False),
        ("0.14.0", True, False),
        ("0.32.0+cpu", True, False),
    ],
)
def test_flags_follow_the_version(version: str, with_length: bool, quiet: bool) -> None:
    flags = vllm_flags(runtime={**RUNTIME, "version": version})
    assert ("--max-model-len=auto" in flags) is with_length
    assert ("--disable-log-requests" in flags) is quiet


def test_an_unknown_version_gets_what_all_know() -> None:
    flags = vllm_flags(runtime={"name": "VLLM", "image": "registry.example/vllm:latest"})
    assert not [flag for flag in flags if flag.startswith(("--max-model-len", "--disable"))]
    # The block size is vLLM's choice unless the spec names one.
    assert not [flag for flag in flags if flag.startswith("--block-size")]
    assert "--block-size=32" in vllm_flags(engine={"blockSize": 32})


def test_the_users_own_flags_come_last() -> None:
    assert vllm_flags(engine={"extraArgs": ["--dtype=half"]})[-1] == "--dtype=half"


@pytest.mark.parametrize(
    ("image", "said", "version"),
    [
        (IMAGE, None, (0, 11, 0)),
        ("registry.example:5000/vllm:0.10.2-cpu", None, (0, 10, 2)),
        ("registry.example:5000/vllm", None, None),
        ("vllm/vllm-openai:latest", None, None),
        ("vllm/vllm-openai:nightly-0a1b", None, None),
        ("vllm/vllm-openai@sha256:0123", None, None),
        ("vllm/vllm-openai:v0.9.2@sha256:0123", None, (0, 9, 2)),
        ("vllm/vllm-openai:latest", "0.12.0rc1", (0, 12, 0)),
        (IMAGE, "0.14", (0, 14, 0)),
    ],
)
def test_the_version_is_said_or_read_from_the_tag(
    image: str, said: str | None, version: tuple[int, int, int] | None
) -> None:
    assert read_version(image, said) == version


def test_only_what_the_gate_moves_is_sent() -> None:
    live = runtimes.live_limits(RuntimeName.VLLM)
    every = Limits(1024, 0.9, 8, 2048, 0.05, 256, 0.5)
    assert every.only(live) == Limits(
        max_model_len=1024, max_num_seqs=8, long_prompt_tokens=256, long_prompt_share=0.5
    )
    assert every.only(runtimes.live_limits(RuntimeName.PLIMSOLL)) == every


def test_the_line_stays_where_the_spec_has_it() -> None:
    settings = tuning_settings(
        deployment(
            runtime=RUNTIME,
            engine={"gpuMemoryUtilization": 0.8},
            tuning={"gpuMemoryUtilization": {"minAllowed": 0.5, "maxAllowed": 0.95}},
        )
    )
    assert (settings.min_utilization, settings.max_utilization) == (0.8, 0.8)
    assert not settings.may_move(Parameter.WATERMARK)
    assert settings.may_move(Parameter.MAX_MODEL_LEN)


def test_a_death_by_the_line_is_told_and_moves_nothing() -> None:
    live = runtimes.live_limits(RuntimeName.VLLM)
    fleet = Fleet(with_lane(live=live, min_utilization=0.9, max_utilization=0.9))
    first = fleet.look()
    assert first.limits.watermark is None
    assert first.limits.long_prompt_share is not None
    oom = died(FailureClass.CUDA_OOM_AT_RUNTIME, fleet.now, serving=True)
    decision = fleet.see({}, [oom])
    assert decision.limits.gpu_memory_utilization == 0.9
    limited = verdict(decision, "TuningLimited")
    assert (limited.status, limited.reason) == (Status.TRUE, "ReadAtStart")
    assert "lower spec.engine.gpuMemoryUtilization" in limited.message
    assert holds(decision, "OOMDetected")
    fleet.settings = replace(fleet.settings, mode=TuningMode.OFF)
    assert not holds(fleet.look(), "TuningLimited")


def sidecar_body(**engine: Any) -> Json:
    """A pod as the kubelet tells of it: vLLM among the init containers."""
    body = pod_body()
    (gate,) = body["status"]["containerStatuses"]
    gate["name"] = "gate"
    body["spec"]["initContainers"] = [
        {"name": "engine", "resources": {"limits": {"memory": "8Gi"}}}
    ]
    running: Json = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    body["status"]["initContainerStatuses"] = [
        {**gate, "name": "engine", "image": IMAGE, "state": running, "started": True, **engine}
    ]
    return body


def test_a_pod_serves_when_both_have_started() -> None:
    found = read_pod(sidecar_body())
    assert found.serves
    assert found.container is not None
    assert (found.container.image, found.container.memory_limit) == (IMAGE, "8Gi")
    assert not read_pod(sidecar_body(started=False)).serves
    body = sidecar_body()
    body["status"]["containerStatuses"] = []
    assert read_pod(body).gate is None
