"""The tuner's state in status, the limits file and the MemoryProfile, there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll_operator.spec import Deployment, TuningMode
from plimsoll_operator.tuning.histogram import EMPTY
from plimsoll_operator.tuning.profile import (
    build_profile,
    build_profile_status,
    profile_key,
    read_learned,
)
from plimsoll_operator.tuning.record import limits_document, read_state, record_tuning
from plimsoll_operator.tuning.settings import tuning_settings
from plimsoll_operator.tuning.values import (
    Blocked,
    Failure,
    FailureClass,
    Learned,
    Limits,
    Parameter,
    Peaks,
    TuningState,
)
from support.tuning import START, Fleet, with_lane

CRDS = Path(__file__).parents[2] / "crds"

LEARNED = Learned(
    blocked=(Blocked(0.98, 0.90, START, FailureClass.CUDA_OOM_AT_RUNTIME, 2),),
    last_known_good=0.88,
    last_oom_at=START,
    overrun=0.03,
    overrun_at=START,
    peaks=Peaks(*(EMPTY.added([(value, 2.0)], START) for value in (0.9, 0.2, 0.04, 900, 90))),
)


def busy_fleet() -> Fleet:
    fleet = Fleet(with_lane(memory_limit="8Gi"))
    fleet.idle(30, kv_cache_usage=0.97, waiting=7, device_free_low_water_bytes=0)
    death = Failure(FailureClass.CUDA_OOM_AT_START, "u/1", "m-0", "died", at=fleet.now)
    fleet.see({}, [death])
    return fleet


def schema(name: str) -> dict[str, Any]:
    crd = yaml.safe_load((CRDS / f"{name}.plimsoll.dev.yaml").read_text())
    found: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    return found


def undeclared(value: Any, declared: dict[str, Any], path: str) -> list[str]:
    """Fields that the API server would prune."""
    if isinstance(value, list):
        return [f for item in value for f in undeclared(item, declared["items"], f"{path}[]")]
    if not isinstance(value, dict):
        return []
    if "additionalProperties" in declared:
        return []
    properties = declared.get("properties", {})
    missing = [f"{path}.{key}" for key in value if key not in properties]
    known = [key for key in value if key in properties]
    return missing + [f for k in known for f in undeclared(value[k], properties[k], f"{path}.{k}")]


def test_every_field_that_is_written_is_in_the_schema() -> None:
    status = schema("llmdeployments")["status"]
    assert undeclared(record_tuning(busy_fleet().log[-1]), status, "status") == []
    profile = schema("memoryprofiles")
    assert undeclared(build_profile_status(LEARNED), profile["status"], "status") == []


def test_an_operator_restart_loses_nothing_that_matters() -> None:
    fleet = busy_fleet()
    read = read_state(json.loads(json.dumps(record_tuning(fleet.log[-1]))))
    assert read.limits == fleet.state.limits
    assert read.history == fleet.state.history
    assert (read.revision, read.revised_at) == (fleet.state.revision, fleet.state.revised_at)
    assert read.oom.total == 1
    # The death that has been answered is not answered again.
    again = Fleet(fleet.settings, fleet.learned, read, now=fleet.now)
    death = Failure(FailureClass.CUDA_OOM_AT_START, "u/1", "m-0", "died", at=fleet.now)
    decision = again.see({}, [death])
    assert decision.changes == ()
    assert decision.limits == fleet.state.limits


def test_a_lane_out_of_force_reads_back() -> None:
    """A watermark of nothing is a value, not an absent one."""
    fleet = Fleet(with_lane())
    fleet.look()
    fleet.settings = with_lane(mode=TuningMode.OFF)
    decision = fleet.look()
    assert decision.limits.watermark == 0.0
    read = read_state(json.loads(json.dumps(record_tuning(decision))))
    assert read.limits == decision.limits


def test_a_new_object_has_no_state() -> None:
    assert read_state({}) == TuningState()


def test_the_limits_file() -> None:
    text = limits_document(3, Limits(max_model_len=4096, gpu_memory_utilization=0.88))
    assert json.loads(text) == {
        "revision": 3,
        "limits": {"maxModelLen": 4096, "gpuMemoryUtilization": 0.88},
    }


def test_what_was_learned_there_and_back() -> None:
    assert read_learned({"status": build_profile_status(LEARNED)}) == LEARNED
    assert build_profile_status(Learned()) == {}
    assert read_learned(None) == read_learned({"spec": {}}) == Learned()


def deployment(**spec: Any) -> Deployment:
    return Deployment.parse(
        {
            "metadata": {"name": "m", "namespace": "n", "uid": "u", "generation": 1},
            "spec": {"model": {"uri": "hf://Org/Model-8B"}, **spec},
        }
    )


def test_the_key_of_a_profile_names_what_changes_memory() -> None:
    key = profile_key(deployment(), "engine:0.1.0")
    assert key.text == "Org/Model-8B/main/auto/nvidia.com/gpu/tp1/engine:0.1.0"
    assert key.name.startswith("org-model-8b-main-auto-nvidia-com-gpu-tp")
    body = build_profile("n", key)
    assert body["spec"]["device"] == "nvidia.com/gpu"
    assert "ownerReferences" not in body["metadata"]


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"uri": "hf://Org/Model-8B", "revision": "v2"}},
        {"parallelism": {"tensor": 2}},
        {"accelerator": {"resourceName": "amd.com/gpu"}},
        {"accelerator": {"resourceName": ""}, "resources": {"limits": {"memory": "8Gi"}}},
        {"engine": {"extraArgs": ["--dtype=float16"]}},
        {"engine": {"extraArgs": ["--dtype", "float32"]}},
        {"podTemplate": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"}}},
    ],
)
def test_another_key_is_another_profile(spec: dict[str, Any]) -> None:
    one, other = (profile_key(d, "engine") for d in (deployment(), deployment(**spec)))
    assert one.name != other.name
    assert len(other.name) <= 63


def test_the_memory_limit_counts_only_where_it_is_the_device() -> None:
    limits = {"resources": {"limits": {"memory": "8Gi"}}}
    assert profile_key(deployment(**limits), "e") == profile_key(deployment(), "e")


class TestSettings:
    def test_defaults_are_those_of_the_crd(self) -> None:
        found = tuning_settings(deployment())
        assert (found.min_utilization, found.max_utilization) == (0.50, 0.90)
        assert not found.tunes_length
        assert (found.floor, found.ceiling) == (None, None)

    def test_a_low_start_is_its_own_minimum(self) -> None:
        found = tuning_settings(deployment(engine={"gpuMemoryUtilization": 0.3}))
        assert (found.min_utilization, found.max_utilization) == (0.3, 0.3)

    def test_bounds_of_the_spec(self) -> None:
        found = tuning_settings(
            deployment(
                engine={"maxModelLen": 8192, "gpuMemoryUtilization": 0.85},
                tuning={
                    "gpuMemoryUtilization": {"minAllowed": 0.8, "maxAllowed": 0.94},
                    "maxModelLen": {"minAllowed": 2048, "maxAllowed": 16384},
                },
                accelerator={"resourceName": ""},
                resources={"limits": {"memory": "4Gi"}},
            )
        )
        assert (found.min_utilization, found.max_utilization) == (0.8, 0.94)
        assert (found.tunes_length, found.floor, found.ceiling) == (True, 2048, 16384)
        assert found.start == Limits(8192, 0.85)
        assert (found.on_cpu, found.memory_limit) == (True, "4Gi")

    def test_flags_of_the_users_pin_the_lane(self) -> None:
        flags = ["--watermark=0.1", "--long-prompt-share", "0.5"]
        found = tuning_settings(deployment(engine={"extraArgs": flags}))
        assert found.pinned == {Parameter.WATERMARK, Parameter.LONG_PROMPT_SHARE}
        assert tuning_settings(deployment()).pinned == frozenset()

    def test_the_batch_and_the_price_of_a_restart_are_the_specs(self) -> None:
        found = tuning_settings(
            deployment(
                engine={"maxNumSeqs": 8, "maxNumBatchedTokens": 512},
                tuning={"maxRestartsPerDay": 1},
                drain="30s",
            )
        )
        assert (found.max_num_seqs, found.max_num_batched_tokens) == (8, 512)
        assert (found.max_restarts_per_day, found.drain) == (1, 30.0)
