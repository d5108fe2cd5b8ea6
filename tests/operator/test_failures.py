"""How the ends of containers are classified (cases B16 and B17, and vLLM's own words)."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from plimsoll_operator.observed import Container, Pod, Termination
from plimsoll_operator.pods import read_pod
from plimsoll_operator.tuning.failures import MAX_MESSAGE, classify
from plimsoll_operator.tuning.values import Failure, FailureClass
from support.resources import NOW, pod_body, time


def pod(container: Container | None, **changes: Any) -> Pod:
    default = Pod(
        name="m-0",
        uid="uid",
        ordinal=0,
        ip=None,
        node="n",
        revision="r",
        created_at=0.0,
        deleting=False,
        ready=False,
        ready_since=None,
        phase="Running",
        unschedulable=None,
        container=container,
    )
    return replace(default, **changes)


def ended(message: str = "", *, reason: str = "Error", code: int = 1, **changes: Any) -> Pod:
    end = Termination(reason, code, message, started_at=100.0, finished_at=160.0)
    container = Container(
        image="engine", ready=False, started=False, restarts=1, termination=end, **changes
    )
    return pod(container)


def found(of: Pod) -> Failure:
    failure = classify(of)
    assert failure is not None
    return failure


def test_a_pod_that_never_failed() -> None:
    assert classify(pod(None)) is None
    assert classify(pod(Container(image="e", ready=True, started=True, restarts=0))) is None


B16_STATUS = {
    "containerStatuses": [
        {
            "name": "engine",
            "restartCount": 3,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}},
        }
    ]
}


def test_b16_a_container_killed_at_its_limit() -> None:
    body = {
        "metadata": {
            "name": "m-0",
            "uid": "u",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {},
        },
        "spec": {
            "containers": [
                {"name": "helper"},
                {"name": "engine", "resources": {"limits": {"memory": "8Gi"}}},
            ]
        },
        "status": B16_STATUS,
    }
    failure = found(read_pod(body))
    assert failure.failure_class is FailureClass.CGROUP_OOM
    assert "8Gi" in failure.message
    assert failure.serving is None
    assert failure.incident == "u/3"


def test_b16_a_device_oom_is_another_class() -> None:
    message = json.dumps({"class": "CudaOOMAtRuntime", "phase": "serving", "message": "no"})
    assert found(ended(message)).failure_class is FailureClass.CUDA_OOM_AT_RUNTIME


def test_b16_a_bare_137_is_neither() -> None:
    failure = found(ended(code=137))
    assert failure.failure_class is FailureClass.ENGINE_DEAD
    assert failure.message == "the engine was killed by signal 9"


def test_b17_warm_up_runs_out_of_memory() -> None:
    message = (
        '{"error": "out_of_memory", "phase": "warmup", "what": "sampler", '
        '"max_num_seqs": 1024, "vocab_size": 151936}'
    )
    failure = found(ended(message))
    assert failure.failure_class is FailureClass.CUDA_OOM_AT_START
    assert failure.figures["max_num_seqs"] == 1024
    assert failure.figures["vocab_size"] == 151_936
    assert failure.serving is False
    assert "1024" in failure.message
    assert "151936" in failure.message


def test_the_engines_own_message_is_believed() -> None:
    document = {
        "class": "KVTooSmallForMaxLen",
        "phase": "kv_cache",
        "message": "8192 tokens need 0.4 GiB",
        "figures": {"max_model_len_that_fits": 4096, "gpu_memory_utilization_needed": 0.93},
        "suggestion": {"flag": "--max-model-len", "value": 4096},
    }
    # With FallbackToLogsOnError the line may stand at the end of a log.
    failure = found(ended(f"loading...\n{json.dumps(document)}\n", code=1))
    assert failure.failure_class is FailureClass.KV_TOO_SMALL_FOR_MAX_LEN
    assert failure.message == "8192 tokens need 0.4 GiB"
    assert failure.figures["gpu_memory_utilization_needed"] == 0.93
    assert (failure.suggested_flag, failure.suggested_value) == ("--max-model-len", 4096)
    assert (failure.started_at, failure.at) == (100.0, 160.0)


@pytest.mark.parametrize("failure_class", [c for c in FailureClass if c != "CgroupOOM"])
def test_every_class_can_be_named_by_the_engine(failure_class: FailureClass) -> None:
    message = json.dumps({"class": failure_class.value, "phase": "load", "message": "m"})
    assert found(ended(message)).failure_class is failure_class


@pytest.mark.parametrize(
    ("log", "failure_class"),
    [
        (
            (
                "ValueError: Free memory on device cuda:0 (0.41/79.1 GiB) on startup is less than "
                "desired GPU memory utilization (0.92, 72.8 GiB)."
            ),
            FailureClass.GPU_BUSY_AT_START,
        ),
        (
            "AssertionError: Error in memory profiling. Initial free memory 10, current 11",
            FailureClass.GPU_BUSY_AT_START,
        ),
        (
            "ValueError: No available memory for the cache blocks. Try increasing it.",
            FailureClass.KV_TOO_SMALL_FOR_MAX_LEN,
        ),
        (
            (
                "ValueError: To serve at least one request with the model's max seq len (131072), "
                "16.00 GiB KV cache is needed, which is larger than the available KV cache memory "
                "(5.05 GiB). Based on it, the estimated maximum model length is 41392."
            ),
            FailureClass.KV_TOO_SMALL_FOR_MAX_LEN,
        ),
        (
            "To serve at least one request with the models's max seq len (8192), 1 GiB is needed",
            FailureClass.KV_TOO_SMALL_FOR_MAX_LEN,
        ),
        ("ValueError: Cannot auto-fit max_model_len", FailureClass.KV_TOO_SMALL_FOR_MAX_LEN),
        (
            "User-specified max_model_len (8192) is greater than the derived max_model_len (2048)",
            FailureClass.INVALID_CONFIGURATION,
        ),
        (
            (
                "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy "
                "requests."
            ),
            FailureClass.CUDA_OOM_AT_START,
        ),
        ("Failed to load model - not enough GPU memory", FailureClass.MODEL_TOO_LARGE),
        (
            "in profile_run\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
            FailureClass.CUDA_OOM_AT_START,
        ),
        (
            "in execute_model\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 72 MiB",
            FailureClass.CUDA_OOM_AT_RUNTIME,
        ),
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off", FailureClass.GPU_FAULT),
        ("CUDA error: an illegal memory access was encountered", FailureClass.ENGINE_DEAD),
        (
            json.dumps({"class": "EngineDead", "message": "unexpected: CUDA error: ECC error"}),
            FailureClass.GPU_FAULT,
        ),
        (
            json.dumps({"class": "GPUBusyAtStart", "message": "others hold 70 GiB"}),
            FailureClass.GPU_BUSY_AT_START,
        ),
        ("ncclSystemError: System call failed", FailureClass.COLLECTIVE_FAILURE),
        ("Segmentation fault", FailureClass.ENGINE_DEAD),
        ('{"class": "SomethingNew"}', FailureClass.ENGINE_DEAD),
        ("{not json", FailureClass.ENGINE_DEAD),
        ("", FailureClass.ENGINE_DEAD),
    ],
)
def test_last_words_of_engines(log: str, failure_class: FailureClass) -> None:
    assert found(ended(log)).failure_class is failure_class


def test_vllms_estimate_is_a_suggestion() -> None:
    failure = found(ended("No available memory. the estimated maximum model length is 41392"))
    assert (failure.suggested_flag, failure.suggested_value) == ("--max-model-len", 41392)


@pytest.mark.parametrize(
    "reason", ["ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"]
)
def test_an_image_that_cannot_be_had(reason: str) -> None:
    waiting = Container(
        image="registry.example/engine:nope",
        ready=False,
        started=False,
        restarts=0,
        waiting=reason,
        waiting_message="not found",
    )
    failure = found(pod(waiting))
    assert failure.failure_class is FailureClass.IMAGE_ERROR
    assert failure.message == f"image registry.example/engine:nope: {reason}: not found"


def test_no_node_for_the_pod() -> None:
    failure = found(pod(None, unschedulable="0/3 nodes: 3 Insufficient nvidia.com/mig-3g.71gb"))
    assert failure.failure_class is FailureClass.UNSCHEDULABLE
    assert "nvidia.com/mig-3g.71gb" in failure.message


@pytest.mark.parametrize(
    ("status", "message", "at"),
    [
        (
            {
                "conditions": [
                    {
                        "type": "DisruptionTarget",
                        "status": "True",
                        "reason": "PreemptionByScheduler",
                        "message": "a pod of higher priority needs the node",
                        "lastTransitionTime": time(NOW),
                    }
                ]
            },
            (
                "taken from node node-1 (PreemptionByScheduler): a pod of higher priority needs the "
                "node"
            ),
            NOW,
        ),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."},
            "taken from node node-1 (Evicted): The node was low on memory.",
            None,
        ),
    ],
)
def test_what_took_a_pod_from_its_node_is_told(status: Any, message: str, at: float | None) -> None:
    body = pod_body()
    body["status"] |= status
    failure = found(read_pod(body))
    assert (failure.failure_class, failure.message) == (FailureClass.EVICTED, message)
    assert failure.at == at


def test_since_when_no_node_is_found_is_told() -> None:
    waiting = read_pod(pod_body(unschedulable="0/3 nodes: too few GPUs", created=NOW))
    assert (found(waiting).failure_class, found(waiting).at) == (FailureClass.UNSCHEDULABLE, NOW)


def test_an_oom_explains_more_than_the_image_pull_after_it() -> None:
    of = ended(reason="OOMKilled", code=137, waiting="ImagePullBackOff")
    assert found(of).failure_class is FailureClass.CGROUP_OOM
    of = ended("Segmentation fault", waiting="ImagePullBackOff")
    assert found(of).failure_class is FailureClass.IMAGE_ERROR


def test_a_pod_that_is_being_deleted_has_not_failed() -> None:
    assert classify(replace(ended(code=137), deleting=True)) is None


def test_one_death_is_one_incident_before_and_after_the_restart_is_counted() -> None:
    before = ended(code=1)
    assert before.container is not None
    dead = replace(before, container=replace(before.container, restarts=0, ended=True))
    assert found(dead).incident == found(before).incident == "uid/1"


def test_a_status_of_zero_is_a_death_too() -> None:
    """Engines have been seen to end with 0 when they died."""
    assert found(ended(code=0, reason="Completed")).failure_class is FailureClass.ENGINE_DEAD


def test_messages_stay_short() -> None:
    message = json.dumps({"class": "ModelLoadFailed", "message": "x" * 4000})
    assert len(found(ended(message)).message) == MAX_MESSAGE


def gate(message: str = "", *, reason: str = "Error", code: int = 1, **changes: Any) -> Container:
    end = Termination(reason, code, message, started_at=100.0, finished_at=160.0)
    default = Container(
        image="ours", ready=False, started=False, restarts=2, termination=end, memory_limit="1Gi"
    )
    return replace(default, **changes)


@pytest.mark.parametrize(
    ("container", "failure_class", "said"),
    [
        (gate(reason="OOMKilled", code=137), FailureClass.ENGINE_DEAD, "memory limit of 1Gi"),
        (gate("Traceback\nOSError: no"), FailureClass.ENGINE_DEAD, "status 1: OSError: no"),
        (
            gate('{"class": "InvalidConfiguration", "message": "--port is 0"}', code=2),
            FailureClass.INVALID_CONFIGURATION,
            "status 2: --port is 0",
        ),
        (gate(waiting="ImagePullBackOff"), FailureClass.IMAGE_ERROR, "image ours"),
    ],
)
def test_the_gates_end_is_not_the_engines(
    container: Container, failure_class: FailureClass, said: str
) -> None:
    serving = Container(image="vllm", ready=True, started=True, restarts=0)
    failure = found(pod(serving, gate=container))
    assert failure.failure_class is failure_class
    assert said in failure.message
    # The engine's own death tells more.
    both = replace(ended(reason="OOMKilled", code=137), gate=container)
    assert found(both).failure_class is FailureClass.CGROUP_OOM
