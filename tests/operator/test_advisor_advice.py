"""What is advised over pass after pass, and what becomes of it."""

from __future__ import annotations

import pytest

from plimsoll_operator.advisor.advice import Outcome, standing
from plimsoll_operator.checks import Violation
from plimsoll_operator.tuning.values import Parameter, Rule, Unknown, UnknownReason
from support.advising import ARGS, Scene, advisor_body, pod_body, vllm_page
from support.resources import NOW, time

DIED = {
    "reason": "Error",
    "exitCode": 1,
    "message": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.15 GiB",
    "startedAt": time(NOW - 3000),
    "finishedAt": time(NOW - 30),
}
KILLED = {**DIED, "reason": "OOMKilled", "exitCode": 137, "message": ""}


def advised(scene: Scene) -> dict[Parameter, float]:
    assert scene.known is not None
    return {each.parameter: each.to for each in standing(scene.known.advice)}


def burst(scene: Scene, passes: int = 3) -> None:
    """A full cache, a queue and preemptions."""
    for _ in range(passes):
        scene.see(usage=0.99, waiting=30, running=100, preemptions=10.0 * scene.passes)


def test_calm_traffic_leaves_everything_as_it_is() -> None:
    scene = Scene()
    for _ in range(10):
        scene.see(usage=0.3, running=4)
    # The lane alone: vLLM has none, and the tuner starts with one whatever the traffic.
    assert set(advised(scene)) == {Parameter.LONG_PROMPT_TOKENS, Parameter.LONG_PROMPT_SHARE}
    assert scene.status["recommendation"]["summary"] == "as it is"
    assert scene.status["recommendation"]["gateFlags"] == [
        "--long-prompt-tokens=8192",
        "--long-prompt-share=0.7",
    ]
    assert scene.condition("Ready")["reason"] == "Advising"
    assert scene.condition("ChangeAdvised")["reason"] == "AsItIs"


def test_a_burst_is_answered_and_stands_for_a_day_after_it() -> None:
    scene = Scene(advisor_body(tuning={"maxModelLen": {"minAllowed": 4096}}))
    scene.see()
    burst(scene)
    # 100 run and the cache does not carry them; no length was asked to move first.
    assert advised(scene)[Parameter.MAX_NUM_SEQS] < 100
    assert scene.status["current"]["maxNumSeqs"] == 256
    (said,) = [r for r in scene.status["recommendation"]["reasons"] if "--max-num-seqs" in r]
    assert "preemption: vllm-5d8f-abcde: cache 99% full" in said
    assert scene.condition("ChangeAdvised")["status"] == "True"

    scene.see(usage=0.2, preemptions=1000.0)
    scene.now += 23 * 3600
    scene.see(usage=0.2, preemptions=1000.0)
    assert Parameter.MAX_NUM_SEQS in advised(scene)
    scene.now += 2 * 3600
    scene.see(usage=0.2, preemptions=1000.0)
    assert Parameter.MAX_NUM_SEQS not in advised(scene)
    assert scene.known is not None
    outcomes = {each.parameter: each.outcome for each in scene.known.advice}
    assert outcomes[Parameter.MAX_NUM_SEQS] is Outcome.EXPIRED


def test_advice_that_is_followed_is_not_given_again() -> None:
    scene = Scene()
    scene.see()
    burst(scene)
    wanted = advised(scene)[Parameter.MAX_NUM_SEQS]
    args = [*ARGS[:-1], f"--max-num-seqs={wanted - 2:.0f}"]
    scene.pods.append(pod_body("vllm-5d8f-newer", args=args, created=NOW + 1))
    scene.see(usage=0.5, preemptions=10.0 * scene.passes - 10.0)
    assert Parameter.MAX_NUM_SEQS not in advised(scene)
    assert scene.known is not None
    assert [each.outcome for each in scene.known.advice if each.parameter is Parameter.MAX_NUM_SEQS
            ] == [Outcome.FOLLOWED]  # fmt: skip


def test_of_a_burst_the_first_word_counts_and_of_several_the_most_careful() -> None:
    scene = Scene()
    scene.see()
    burst(scene)
    first = advised(scene)[Parameter.MAX_NUM_SEQS]
    # Its end, when few still run: a word about a moment that Auto would not have seen.
    scene.see(usage=0.6, running=3, preemptions=1000.0)
    scene.see(usage=0.2, preemptions=1000.0)
    scene.see(usage=0.6, running=3, preemptions=1001.0)
    assert advised(scene)[Parameter.MAX_NUM_SEQS] == first
    scene.now += 3600
    scene.see(usage=0.2, preemptions=1001.0)
    scene.see(usage=0.99, running=40, waiting=9, preemptions=1010.0)
    assert advised(scene)[Parameter.MAX_NUM_SEQS] < min(first, 40)
    assert scene.known is not None
    (advice,) = [e for e in scene.known.advice if e.parameter is Parameter.MAX_NUM_SEQS]
    assert (advice.times, advice.before) == (2, 256)
    assert "40 running" in advice.reason


@pytest.mark.parametrize(
    ("end", "uses_gpu", "reason", "moves"),
    [
        pytest.param(DIED, True, "DeviceMemoryOOM", True, id="device memory, in vLLM's own words"),
        pytest.param(
            KILLED, True, "HostMemoryOOM", False, id="host memory is not vLLM's to divide"
        ),
        pytest.param(KILLED, False, "ContainerMemoryOOM", True, id="on CPU it is"),
    ],
)
def test_an_end_by_memory_is_counted_once_and_lowers_the_line(
    end: dict[str, object], uses_gpu: bool, reason: str, moves: bool
) -> None:
    scene = Scene()
    limits = {"memory": "64Gi", **({"nvidia.com/gpu": "1"} if uses_gpu else {})}
    scene.pods = [pod_body(limits=limits)]
    # Seen serving before it died.
    scene.now = NOW - 60
    scene.see()
    scene.now = NOW
    scene.pods = [pod_body(last_terminated=end, restarts=1, limits=limits)]
    scene.see()
    scene.see()
    assert scene.status["oom"]["total"] == 1
    assert scene.condition("OOMDetected")["reason"] == reason
    assert scene.status["recommendation"]["saves"][0].startswith("1 ends by memory")
    if moves:
        assert advised(scene)[Parameter.GPU_MEMORY_UTILIZATION] == pytest.approx(0.90)
        assert "--gpu-memory-utilization=0.9" in scene.status["recommendation"]["vllmFlags"]
    else:
        assert Parameter.GPU_MEMORY_UTILIZATION not in advised(scene)
        assert "raise the container's memory limit" in scene.condition("OOMDetected")["message"]


def test_the_bounds_of_the_spec_are_kept() -> None:
    scene = Scene(advisor_body(tuning={"gpuMemoryUtilization": {"minAllowed": 0.91}}))
    scene.pods = [pod_body(last_terminated=DIED, restarts=1)]
    scene.see()
    assert advised(scene)[Parameter.GPU_MEMORY_UTILIZATION] == pytest.approx(0.91)


def test_the_share_of_memory_is_no_advice_where_the_cache_has_a_fixed_size() -> None:
    scene = Scene()
    args = [*ARGS, "--kv-cache-memory-bytes=8G"]
    scene.pods = [pod_body(args=args, last_terminated=DIED, restarts=1)]
    scene.see()
    assert Parameter.GPU_MEMORY_UTILIZATION not in advised(scene)
    assert scene.condition("OOMDetected")["status"] == "True"


def test_the_length_is_no_advice_unless_the_spec_asks() -> None:
    silent, asked = Scene(), Scene(advisor_body(tuning={"maxModelLen": {"minAllowed": 4096}}))
    for scene in (silent, asked):
        scene.see()
        for _ in range(20):
            scene.see(usage=0.96, waiting=30, running=100)
    assert Parameter.MAX_MODEL_LEN not in advised(silent)
    # Every pass would halve what is in force, and nothing was changed: one step, not many.
    assert advised(asked)[Parameter.MAX_MODEL_LEN] == 16384


def test_unknown_freezes_the_advice_and_says_what_is_missing() -> None:
    scene = Scene()
    scene.see()
    gone = Unknown(UnknownReason.UNREACHABLE, "vllm-5d8f-abcde", "http://10.244.0.7: refused")
    for _ in range(3):
        scene.see({"vllm-5d8f-abcde": gone})
    assert scene.condition("MetricsAvailable")["reason"] == "EngineUnreachable"
    assert scene.condition("Ready")["reason"] == "EngineUnreachable"
    assert scene.status["pods"] == [
        {"name": "vllm-5d8f-abcde", "state": "Unread", "message": "http://10.244.0.7: refused"}
    ]
    # A pod that is not ready yet is no gap in what is known.
    scene.pods = [pod_body(ready=False)]
    scene.see({"vllm-5d8f-abcde": gone})
    assert scene.condition("MetricsAvailable")["reason"] == "NoEngines"
    assert scene.status["pods"][0]["state"] == "Starting"


def test_settings_come_from_words_or_page_and_stay_unknown_otherwise() -> None:
    scene = Scene()
    scene.pods = [pod_body(args=["--model=org/m"])]
    scene.see()
    assert scene.status["current"] == {
        "model": "org/m",
        "gpuMemoryUtilization": 0.92,
        "blockSize": 16,
        "cacheTokens": 2588 * 16,
        "sources": {
            "model": "Flag",
            "gpuMemoryUtilization": "Metrics",
            "blockSize": "Metrics",
            "cacheTokens": "Metrics",
        },
    }
    assert scene.condition("SettingsKnown")["status"] == "True"
    # How many may run at once is unknown, but more than it was told is seen to run.
    burst(scene)
    assert advised(scene)[Parameter.MAX_NUM_SEQS] < 100

    scene = Scene()
    scene.pods = [pod_body(args=["--gpu-memory-utilization=$(SHARE)"])]
    scene.see(config='block_size="16"')
    settings = scene.condition("SettingsKnown")
    assert (settings["status"], settings["reason"]) == ("False", "SettingUnknown")
    assert "--gpu-memory-utilization is $(SHARE), which is no number here" in settings["message"]
    assert scene.condition("Ready")["reason"] == "SettingUnknown"
    assert "recommendation" not in scene.status or not scene.status["recommendation"].get("limits")


def test_without_a_target_what_was_known_stands() -> None:
    scene = Scene()
    scene.see()
    burst(scene)
    before = advised(scene)
    scene.missing, scene.pods = Violation("NotFound", "there is no Deployment vllm"), []
    scene.see()
    assert scene.condition("TargetFound")["reason"] == "NotFound"
    assert scene.condition("Ready")["message"] == "there is no Deployment vllm"
    assert advised(scene) == before
    scene.restart()
    scene.see()
    assert advised(scene) == before
    scene.missing = None
    scene.see()
    assert scene.condition("Ready")["reason"] == "NoPods"


def test_what_there_is_to_save_is_told_in_figures() -> None:
    scene = Scene()
    scene.pods = [pod_body(f"vllm-5d8f-{i}") for i in range(4)]
    for i in range(13):
        # Two looks into each window of five minutes.
        for j in range(2):
            scene.see(usage=0.30, running=3, ended=10 * (2 * i + j), preemptions=0.0)
        scene.now += 300 - 30
    scene.see(usage=0.30, running=3, ended=260)
    scene.see(usage=0.30, running=3, ended=260, preemptions=5.0)
    saves = scene.status["recommendation"]["saves"]
    assert scene.status["traffic"]["preemptions"] == 20
    assert "20 preemptions: about 22000 tokens computed again, " in saves[0]
    assert "of a cache was wanted at the peaks" in saves[1]
    assert "for the cache's sake 2 of 4 pods would do" in saves[1]


def test_a_change_of_the_flags_is_the_users_and_no_event() -> None:
    scene = Scene()
    scene.see()
    scene.see()
    scene.pods = [pod_body(args=[*ARGS[:1], "--gpu-memory-utilization=0.85"])]
    found = scene.see()
    assert found.decision is not None
    assert [change.rule for change in found.decision.changes] == [Rule.SPEC]
    assert found.decision.events == ()


def test_a_workers_end_counts_and_its_page_is_not_asked() -> None:
    scene = Scene(advisor_body("LeaderWorkerSet"))
    group = "leaderworkerset.sigs.k8s.io/"
    leader, worker = pod_body("vllm-0"), pod_body("vllm-0-1", last_terminated=DIED, restarts=1)
    leader["metadata"]["labels"] = {f"{group}name": "vllm", f"{group}worker-index": "0"}
    worker["metadata"]["labels"] = {f"{group}name": "vllm", f"{group}worker-index": "1"}
    scene.pods = [leader, worker]
    scene.see()
    assert [each["state"] for each in scene.status["pods"]] == ["Read", "Worker"]
    assert scene.condition("MetricsAvailable")["status"] == "True"
    assert scene.status["oom"]["total"] == 1


def test_a_pod_that_cannot_start_is_told_with_the_figure_that_would_work() -> None:
    scene = Scene()
    said = (
        "ValueError: To serve at least one request with the models's max seq len (32768), 4.0 GiB KV "
        "cache is needed, which is larger than the available KV cache memory (3.1 GiB). Based on the "
        "available memory, the estimated maximum model length is 25344."
    )
    body = pod_body(ready=False, restarts=2)
    (state,) = body["status"]["containerStatuses"]
    end = {**DIED, "message": said}
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
    state |= {"started": False, "state": waiting, "lastState": {"terminated": end}}
    scene.pods = [body]
    scene.see({})
    ready = scene.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "NoPodRuns")
    assert ready["message"].endswith("; --max-model-len=25344 would work")
    assert scene.status["pods"][0]["state"] == "NotRunning"
    assert scene.status["failures"]["last"]["class"] == "KVTooSmallForMaxLen"
    # One that serves beside it is advised all the same.
    scene.pods.append(pod_body("vllm-5d8f-b", created=NOW + 1))
    scene.see({"vllm-5d8f-b": vllm_page()})
    assert scene.condition("Ready")["message"] == "1 of 2 pods are read"
    assert [each["state"] for each in scene.status["pods"]] == ["NotRunning", "Read"]
