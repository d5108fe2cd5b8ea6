"""The model is fetched into the claim before any pod is made with it."""

from typing import Any

import pytest

from plimsoll_operator import names
from plimsoll_operator.desired.prefetch_job import build_prefetch_job
from plimsoll_operator.prefetch import FAILED, FETCHING, RETRY_SECONDS, Prefetch, judge_prefetch
from support.resources import NOW, deployment, pod_body, time

Json = dict[str, Any]
CACHE = {"claimName": "models", "prefetch": True}


def job(uri: str = "hf://org/tiny", **spec: Any) -> Json:
    found = build_prefetch_job(deployment(model={"uri": uri, "cache": CACHE}, **spec), "engine:1")
    assert found is not None
    return found


def ended(condition: str, at: float = NOW, **wanted: Any) -> Json:
    state = {"type": condition, "status": "True", "lastTransitionTime": time(at), "message": "m"}
    return {**job(**wanted), "status": {"conditions": [state]}}


def failed_pod(message: str) -> Json:
    end = {"exitCode": 1, "reason": "Error", "message": message, "finishedAt": time(NOW)}
    body = pod_body("assistant-prefetch-x7x2p", ready=False, terminated=end)
    body["status"]["containerStatuses"][0]["name"] = names.PREFETCH_CONTAINER
    return body


def judged(
    live: Json | None, *pods: Json, status: Json | None = None, now: float = NOW
) -> Prefetch:
    return judge_prefetch(job(), live, pods, status or {}, now)


def test_without_prefetch_there_is_no_job_and_nothing_waits() -> None:
    assert build_prefetch_job(deployment(), "engine") is None
    assert judge_prefetch(None, job(), (), {}, NOW) == Prefetch()


def test_the_job_runs_our_image_for_every_runtime_and_is_no_engine_to_the_service() -> None:
    vllm = job(
        runtime={"name": "VLLM", "image": "vllm/vllm-openai:v0.11.0"},
        podTemplate={"env": [{"name": "HF_ENDPOINT", "value": "https://hub.example"}]},
    )
    template = vllm["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert container["image"] == "engine:1"
    assert container["args"] == ["--model=org/tiny"]
    assert {"name": "HF_ENDPOINT", "value": "https://hub.example"} in container["env"]
    selector = names.selector("assistant")
    assert not selector.items() <= template["metadata"]["labels"].items()
    # Its end is seen at once.
    assert template["metadata"]["labels"][names.DEPLOYMENT_LABEL] == "assistant"
    assert not any("gpu" in name for name in container["resources"]["limits"])
    assert len(names.prefetch_job("x" * 52)) <= 63


def test_pods_wait_until_the_job_is_complete() -> None:
    begun = judged(None)
    assert begun.job == job()
    assert begun.waiting is not None
    assert begun.waiting.reason == FETCHING
    # So that it is found when prefetch is turned off meanwhile.
    assert begun.recorded["prefetch"]["job"] == "assistant-prefetch"
    assert judged(job()).holds
    done = judged(ended("Complete"))
    assert not done.holds
    assert done.recorded["prefetch"]["completed"] == done.completed


def test_a_complete_job_that_is_gone_is_not_run_again() -> None:
    status = judged(ended("Complete")).recorded
    gone = judged(None, status=status)
    assert (gone.job, gone.holds, gone.recorded) == (None, False, status)


@pytest.mark.parametrize("state", ["Complete", "Failed"])
def test_the_job_of_another_model_goes_before_the_new_one_comes(state: str) -> None:
    other = ended(state, uri="hf://org/other")
    status = {
        "prefetch": {"completed": other["metadata"]["annotations"][names.TEMPLATE_ANNOTATION]}
    }
    change = judged(other, status=status)
    assert change.job is None
    assert change.holds
    assert judged(None, status=status).job == job()


def test_a_failure_is_told_by_its_cause_and_tried_again_later() -> None:
    said = '{"class": "ModelLoadFailed", "message": "--model org/tiny: does not exist on the hub"}'
    at_work = judged(job(), failed_pod(said))
    assert at_work.waiting is not None
    assert "does not exist on the hub" in at_work.waiting.message
    failed = judged(ended("Failed"), failed_pod(said))
    assert failed.job == job()
    assert failed.failed is not None
    assert failed.failed.reason == FAILED
    again = time(NOW + RETRY_SECONDS)
    wanted = f"Job assistant-prefetch: --model org/tiny: does not exist on the hub; tried again at {again}"
    assert failed.failed.message == wanted
    # Deleted now, made anew by the next pass.
    due = judged(ended("Failed"), failed_pod(said), now=NOW + RETRY_SECONDS)
    assert due.job is None
    assert due.holds
