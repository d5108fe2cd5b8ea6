"""Real engines under the real operator on the local cluster: what a user does, and what goes wrong.

The model is tiny and random, so that a start takes seconds; test_example.py serves the real one.
"""

from __future__ import annotations

import functools
import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from plimsoll_local import models
from support import vllm_image
from support.local_cluster import Json, LocalCluster
from support.serving import OPERATOR_NAMESPACE, Serving, install_operator
from support.tiny_model import MAX_POSITIONS, pretend_to_be_large, write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def serving(
    local_cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """The operator, installed by its chart, and a namespace with a claim that holds two models."""
    home = tmp_path_factory.mktemp("models")
    home.chmod(0o755)
    write_tiny_model(home / "tiny")
    pretend_to_be_large(write_tiny_model(home / "large"))
    install_operator(local_cluster)
    namespace = f"serving-{uuid.uuid4().hex[:6]}"
    local_cluster.kubectl("create", "namespace", namespace)
    serving = Serving(local_cluster, namespace, models.CLAIM_NAME)
    serving.apply(*models.build_volume(home, namespace))
    yield serving
    serving.kubectl("delete", "llmd", "--all")


def uids(pods: list[Json]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def test_a_deployment_serves_and_is_shown(serving: Serving) -> None:
    serving.apply(serving.build("shown"))
    serving.wait_for("shown", "Ready")
    answer = serving.chat("shown")
    assert answer.status == 200
    assert answer.body["usage"]["completion_tokens"] == 8

    header, line = serving.kubectl("get", "llmd", "shown").splitlines()
    assert header.split() == [
        "NAME",
        "READY",
        "REPLICAS",
        "MODEL",
        "LEN",
        "UTIL",
        "KV%",
        "OOMS",
        "AGE",
    ]
    assert line.split()[:5] == ["shown", "True", "1/1", f"pvc://{serving.claim}/tiny", "1024"]
    described = serving.kubectl("describe", "llmd", "shown")
    for text in ("MetricsAvailable", "TuningActive", "1 of 1 replicas serve"):
        assert text in described


def test_too_long_a_prompt_is_refused_and_the_engine_lives_on(serving: Serving) -> None:
    serving.apply(serving.build("shown"))
    serving.wait_for("shown", "Ready")
    refused = serving.chat("shown", "x" * 2000)
    assert refused.status == 400
    error = refused.body["error"]
    assert error["message"].startswith("This model's maximum context length is 1024 tokens.")
    assert (error["type"], error["code"]) == ("BadRequestError", 400)
    assert serving.chat("shown").status == 200
    (pod,) = serving.pods("shown")
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0


def test_a_killed_engine_comes_back_and_its_death_has_a_class(serving: Serving) -> None:
    serving.apply(serving.build("shown"))
    serving.wait_for("shown", "Ready")
    serving.kill_engine("shown-0")

    def last() -> Json | None:
        status = (serving.deployment("shown") or {})["status"]
        found: Json | None = status.get("failures", {}).get("last")
        return found

    failure = serving.cluster.wait_for(last, "the death in status", 60)
    assert failure["class"] == "EngineDead"
    assert failure["pod"] == "shown-0"
    serving.wait_for("shown", "Ready")
    assert serving.chat("shown").status == 200
    assert serving.deployment("shown")["status"]["oom"]["total"] == 0  # type: ignore[index]


def test_scaling_and_deletion(serving: Serving) -> None:
    serving.apply(serving.build("scaled"))
    serving.wait_for("scaled", "Ready")
    first = uids(serving.pods("scaled"))
    serving.kubectl("scale", "llmd", "scaled", "--replicas=2")
    serving.wait_for("scaled", "Ready")
    pods = serving.pods("scaled")
    assert len(pods) == 2
    # The replica that served goes on serving.
    assert first < uids(pods)

    serving.delete("scaled")
    serving.cluster.wait_for(lambda: not serving.pods("scaled"), "its pods to end", 120)

    serving.cluster.wait_for(lambda: not serving.children("scaled"), "its children to be gone", 60)


def test_what_cannot_work_stalls_with_the_figure_that_would(serving: Serving) -> None:
    missing = {"uri": f"pvc://{serving.claim}/nowhere", "servedName": "tiny"}
    large = {"uri": f"pvc://{serving.claim}/large", "servedName": "large"}
    serving.apply(
        serving.build("missing", model=missing),
        serving.build("large", model=large),
        serving.build("long", engine={"maxModelLen": 50_000, "maxNumSeqs": 8}),
    )
    path = serving.wait_for("missing", "Stalled")
    assert "nowhere" in path["message"]
    length = serving.wait_for("long", "Stalled")
    assert str(MAX_POSITIONS) in length["message"]
    memory = serving.wait_for("large", "Stalled")
    assert memory["reason"] == "ModelTooLarge"
    assert any(word.isdigit() and int(word) > 768 << 20 for word in memory["message"].split())
    for name in ("missing", "large", "long"):
        # Stopped, not restarted for ever; the reason stays to be read.
        stopped = functools.partial(_has_no_pods, serving, name)
        serving.cluster.wait_for(stopped, f"{name} to be stopped")
        assert serving.condition(name, "Stalled")["status"] == "True"

    serving.apply(serving.build("long"))
    serving.wait_for("long", "Ready")
    for name in ("missing", "large", "long"):
        serving.delete(name)


def test_stock_vllm_serves_behind_the_gate(serving: Serving) -> None:
    """A scripted vLLM in the place of the image: what the operator makes of it is all real."""
    runtime = {"name": "VLLM", "image": vllm_image.NAME}
    tuning = {"maxModelLen": {"minAllowed": 128, "maxAllowed": 1024}}
    serving.apply(
        serving.build("stock", runtime=runtime, tuning=tuning),
        serving.build("broken", runtime=runtime, model={"uri": f"pvc://{serving.claim}/missing"}),
    )
    serving.wait_for("stock", "Ready")
    assert serving.chat("stock", "x" * 900).status == 200
    assert serving.chat("stock", "x" * 2000).status == 400
    serving.wait_for("stock", "TuningActive")
    assert serving.condition("stock", "MetricsAvailable")["status"] == "True"
    (before,) = serving.pods("stock")

    # The ceiling, a flag of both, stays; the admitted length moves while vLLM serves.
    engine = {"maxModelLen": 512, "maxNumSeqs": 8, "maxNumBatchedTokens": 256}
    serving.apply(serving.build("stock", runtime=runtime, tuning=tuning, engine=engine))
    serving.cluster.wait_for(
        lambda: serving.chat("stock", "x" * 900).status == 429, "the length to be lowered"
    )
    assert serving.chat("stock", "x" * 400).status == 200
    (after,) = serving.pods("stock")
    assert uids([after]) == uids([before])
    statuses = after["status"]
    parts = [*statuses["containerStatuses"], *statuses["initContainerStatuses"]]
    assert {part["name"]: part["restartCount"] for part in parts} == {"gate": 0, "engine": 0}

    def in_force() -> bool:
        effective = (serving.deployment("stock") or {})["status"]["effective"]
        return (effective["maxModelLen"], effective["gpuMemoryUtilization"]) == (512, 0.9)

    serving.cluster.wait_for(in_force, "the status to say so")

    failure = serving.wait_for("broken", "Stalled")
    assert failure["reason"] == "ModelLoadFailed"
    assert "Cannot find any model weights" in failure["message"]

    # vLLM dies: its container alone starts anew, and the class is told.
    serving.kill_vllm("stock-0")

    def told() -> bool:
        failures = (serving.deployment("stock") or {})["status"].get("failures", {})
        return "killed by signal 9" in failures.get("last", {}).get("message", "")

    serving.cluster.wait_for(told, "the death in status")

    def is_back() -> bool:
        ((gate, engine),) = (
            (each["status"]["containerStatuses"][0], each["status"]["initContainerStatuses"][0])
            for each in serving.pods("stock")
        )
        assert gate["restartCount"] == 0
        back = engine["restartCount"] == 1 and engine["ready"] and gate["ready"]
        return back and serving.chat("stock").status == 200

    serving.cluster.wait_for(is_back, "vLLM to serve again")

    # A stopping pod's gate drains before vLLM is stopped.
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(serving.chat, "stock", "slowly, please")
        serving.cluster.wait_for(
            lambda: "computing slowly" in serving.kubectl("logs", "stock-0", "-c", "engine"),
            "the request to be at vLLM",
        )
        # The pod alone: with its Service goes the address over which the answer comes here.
        serving.kubectl("delete", "pod", "stock-0", "--wait=false")
        assert answer.result().status == 200
    serving.delete("stock")
    serving.delete("broken")
    serving.cluster.wait_for(lambda: not serving.children("stock"), "its children to be gone", 90)


def test_an_invalid_resource_is_refused_by_the_api_server(serving: Serving) -> None:
    said = serving.refuse(serving.build("bad", engine={"gpuMemoryUtilization": 1.5}))
    assert "spec.engine.gpuMemoryUtilization is 1.5; allowed: from 0.05 to 1" in said
    said = serving.refuse(serving.build("bad", model={"uri": "s3://bucket/model"}))
    assert "spec.model.uri is s3://bucket/model; allowed: hf://org/name" in said


def test_a_killed_operator_finishes_the_change_it_was_in(serving: Serving) -> None:
    serving.apply(serving.build("changed"))
    serving.wait_for("changed", "Ready")
    before = uids(serving.pods("changed"))
    engine = {"maxModelLen": 512, "maxNumSeqs": 8, "maxNumBatchedTokens": 256}
    serving.apply(serving.build("changed", engine=engine))
    serving.kill_operator()

    def rolled() -> bool:
        now = uids(serving.pods("changed"))
        return bool(now) and not now & before

    serving.cluster.wait_for(rolled, "the pod to be replaced", 120)
    serving.wait_for("changed", "Ready")
    assert serving.chat("changed", "x" * 600).status == 400
    serving.delete("changed")


def test_an_operator_restart_changes_nothing(serving: Serving) -> None:
    serving.apply(serving.build("shown"))
    serving.wait_for("shown", "Ready")
    before = uids(serving.pods("shown"))
    generation = _statefulset(serving, "shown")["metadata"]["generation"]
    serving.kill_operator()
    serving.cluster.kubectl(
        "-n", OPERATOR_NAMESPACE, "rollout", "status", "deployment/plimsoll", "--timeout=120s"
    )
    serving.kubectl("annotate", "llmd", "shown", "test/touched=yes")
    serving.wait_for("shown", "Ready")
    assert uids(serving.pods("shown")) == before
    assert _statefulset(serving, "shown")["metadata"]["generation"] == generation


def _has_no_pods(serving: Serving, name: str) -> bool:
    return not serving.pods(name)


def _statefulset(serving: Serving, name: str) -> Json:
    found: Json = json.loads(serving.kubectl("get", "sts", name, "-o", "json"))
    return found
