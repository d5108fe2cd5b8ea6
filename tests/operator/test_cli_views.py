"""What top, explain, history, pin, hold and resume say of one LLMDeployment: values in, text out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
from rich.console import Console

from plimsoll_operator.cli import explain, history, mode, pin, top
from plimsoll_operator.cli.errors import CommandError
from plimsoll_operator.cli.view import View, read_view
from plimsoll_operator.spec import TuningMode
from plimsoll_operator.tuning.values import Blocked, FailureClass, Learned
from support.resources import NOW, llmdeployment, time

Json = dict[str, Any]

LOWERED: Json = {
    "time": time(NOW - 120),
    "parameter": "maxModelLen",
    "from": 8192,
    "to": 4096,
    "rule": "pressure",
    "reason": "cache 96 % full with 7 waiting on assistant-0",
    "expected": "fewer preemptions",
    "outcome": "cache 96% -> 71%, waiting 7 -> 0",
    "revision": 3,
}
STATUS: Json = {
    "observedGeneration": 1,
    "readySummary": "1/1",
    "url": "http://assistant.default.svc/v1",
    "conditions": [
        {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message,
            "observedGeneration": 1,
            "lastTransitionTime": time(NOW - 300),
        }
        for kind, status, reason, message in (
            ("Ready", "True", "AllServe", "1 of 1"),
            ("Available", "True", "Serving", "1 of 1"),
            ("Degraded", "False", "Healthy", "no trouble"),
            ("Stalled", "False", "NotStalled", "no trouble"),
            ("MetricsAvailable", "True", "Fresh", "every engine's metrics are complete"),
            ("TuningActive", "True", "Auto", "limits follow the traffic"),
            ("TuningLimited", "True", "AtBound", "maxModelLen is at its floor of 4096"),
        )
    ],
    "effective": {
        "maxModelLen": 4096,
        "maxModelLenCeiling": 8192,
        "gpuMemoryUtilization": 0.84,
        "maxNumSeqs": 16,
        "maxNumBatchedTokens": 256,
        "source": "Tuned",
    },
    "load": {"kvCacheUsagePercent": 71, "running": 5, "waiting": 0, "time": time(NOW - 10)},
    "oom": {"total": 1},
    "tuning": {
        "reason": "the length was lowered",
        "lowerBound": {"maxModelLen": 4096, "gpuMemoryUtilization": 0.6},
        "upperBound": {"maxModelLen": 8192, "gpuMemoryUtilization": 0.9},
        "target": {"maxModelLen": 4096, "gpuMemoryUtilization": 0.84},
        "history": [LOWERED],
    },
}


def resource(status: Json | None = None, **spec: Any) -> Json:
    wanted: Json = {
        "engine": {"maxModelLen": 8192, "gpuMemoryUtilization": 0.85, "maxNumSeqs": 16},
        "tuning": {"mode": "Auto", "maxModelLen": {"minAllowed": 4096, "maxAllowed": 8192}},
        **spec,
    }
    body = llmdeployment(**wanted)
    if status is not None:
        body["status"] = copy.deepcopy(status)
    return body


def view(status: Json | None = STATUS, **spec: Any) -> View:
    return read_view(resource(status, **spec))


def with_condition(kind: str, status: str, reason: str, message: str = "why") -> Json:
    changed = copy.deepcopy(STATUS)
    entry = next((c for c in changed["conditions"] if c["type"] == kind), None)
    assert entry is not None
    entry |= {"status": status, "reason": reason, "message": message}
    return changed


def printed(*resources: Json) -> str:
    console = Console(width=220)
    with console.capture() as capture:
        console.print(top.render(top.build_rows(resources, NOW)))
    return capture.get()


# top


def test_top_has_a_line_with_everything() -> None:
    title, line = (" ".join(each.split()) for each in printed(resource(STATUS)).splitlines())
    assert title == "NAMESPACE NAME READY STATE LEN UTIL KV% RUN WAIT OOMS LAST MOVE WHY"
    assert line.startswith("default assistant 1/1 Ready 4096/8192 0.84 71 5 0 1 ")
    assert "2m ago: length 8192 -> 4096" in line
    assert "pressure: cache 96 % full with 7 waiting on assistant-0" in line


def test_top_shows_replicas_where_they_differ() -> None:
    detail = [
        {"pod": "assistant-0", "maxModelLen": 4096, "gpuMemoryUtilization": 0.84},
        {"pod": "assistant-1", "maxModelLen": 8192, "gpuMemoryUtilization": 0.85},
    ]
    lines = printed(resource({**STATUS, "replicasDetail": detail})).splitlines()
    assert [line.split() for line in lines[2:]] == [
        ["assistant-0", "4096", "0.84"],
        ["assistant-1", "8192", "0.85"],
    ]


@pytest.mark.parametrize("status", [None, {}, "nonsense", {"load": [], "effective": 3}])
def test_top_shows_what_is_unknown_as_unknown(status: Any) -> None:
    body = resource()
    if status is not None:
        body["status"] = status
    (row,) = top.build_rows([body], NOW)
    assert (row.ready, row.length, row.utilization, row.kv_percent) == (None, None, None, None)
    assert (row.running, row.waiting, row.ooms, row.state) == (None, None, None, "?")
    assert printed(body).splitlines()[1].split() == ["default", "assistant", *["?"] * 8]


# The worst that holds -> what stands in STATE.
@pytest.mark.parametrize(
    ("status", "state"),
    [
        (STATUS, "Ready"),
        (with_condition("Ready", "False", "RollingOut"), "NotReady: RollingOut"),
        (with_condition("Degraded", "True", "EngineDead"), "Degraded: EngineDead"),
        (with_condition("Available", "False", "NoReplica"), "NotAvailable: NoReplica"),
        (with_condition("Stalled", "True", "ModelLoadFailed"), "Stalled: ModelLoadFailed"),
        (
            with_condition("MetricsAvailable", "False", "MetricMissing"),
            "NotMetricsAvailable: MetricMissing",
        ),
    ],
)
def test_the_state_is_the_worst(status: Json, state: str) -> None:
    assert top.find_state(view(status)) == state


def test_the_state_has_the_mode_and_a_spec_that_cannot_be_read() -> None:
    assert top.find_state(view(tuning={"mode": "Hold"})) == "Ready, Hold"
    assert top.find_state(view(drain="soon")) == "InvalidSpec"


def test_top_is_sorted_and_says_why_where_nothing_moved() -> None:
    quiet = copy.deepcopy(STATUS)
    quiet["tuning"] = {"reason": "the spec's values are in force"}
    second = resource(quiet)
    second["metadata"]["name"] = "b"
    rows = top.build_rows([second, resource(STATUS)], NOW)
    assert [row.name for row in rows] == ["assistant", "b"]
    assert (rows[1].last, rows[1].why) == ("", "the spec's values are in force")


# history


def test_history_says_what_why_and_what_came_of_it() -> None:
    text = history.render(view(), NOW)
    assert text.splitlines() == [
        "2027-01-15 07:58:00Z (2m ago)  length 8192 -> 4096  by rule pressure",
        "    because cache 96 % full with 7 waiting on assistant-0",
        "    then    cache 96% -> 71%, waiting 7 -> 0",
    ]
    (entry,) = history.build_entries(view())
    assert (entry["from"], entry["to"], entry["rule"]) == (8192, 4096, "pressure")


def test_history_of_nothing_and_of_what_is_not_judged_yet() -> None:
    assert "has moved nothing yet" in history.render(view(None), NOW)
    fresh = copy.deepcopy(STATUS)
    del fresh["tuning"]["history"][0]["outcome"]
    assert "expects fewer preemptions (not judged yet)" in history.render(view(fresh), NOW)


# explain

LEARNED = Learned(
    blocked=(Blocked(0.90, 0.84, NOW - 3600, FailureClass.CUDA_OOM_AT_RUNTIME, 2),),
    last_known_good=0.84,
    last_oom_at=NOW - 3600,
    overrun=0.031,
    overrun_at=NOW - 7200,
)


def explained(seen: View, learned: Learned | None = None, profile: str | None = None) -> str:
    return explain.render(seen, explain.explain(seen, learned, profile, NOW))


def test_explain_goes_from_the_spec_over_the_profile_to_the_decision() -> None:
    text = explained(view(), LEARNED, "qwen-abc")
    titles = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert titles == [
        "default/assistant",
        "In force",
        "Where it started",
        "What was known",
        "What the tuner did",
        "What holds it now",
    ]
    for sentence in (
        "requests up to 4096 tokens are admitted now, 8192 is the most ever",
        "engines may fill 0.84 of the device's memory",
        "source Tuned: what the tuner moved them to",
        "load 10s ago: KV cache 71 % full, 5 running, 0 waiting",
        "the spec starts at length 8192 and utilisation 0.85",
        "tuning.mode is Auto: limits follow the traffic, within the bounds",
        "utilisation may be 0.50 to 0.85",
        "the admitted length may be 4096 to 8192",
        "utilisation 0.90 and above is blocked: 2 deaths by CudaOOMAtRuntime, the last 1h ago",
        "0.84 has carried a nearly full cache safely",
        "3.1% of the device was once in use above the line (2h ago)",
        "nothing is raised for another 5.0 h after the last OOM",
        "length 8192 -> 4096  by rule pressure",
        "TuningLimited True (AtBound, 5m ago): maxModelLen is at its floor of 4096",
    ):
        assert f"  {sentence}" in text
    assert "the last 1h ago; the tuner went to 0.84" in text


def test_explain_says_what_is_not_known() -> None:
    text = explained(view(None), None, None)
    assert "nothing yet: no engine has been started or read" in text
    assert "nothing is remembered of this model on this device" in text
    assert "the operator has not answered the present spec yet" in text


def test_explain_says_when_a_block_is_over_and_when_the_length_is_not_tuned() -> None:
    old = Learned(blocked=(Blocked(0.9, 0.88, NOW - 90_000, FailureClass.CGROUP_OOM),))
    text = explained(view(tuning={"mode": "Off"}), old, "p")
    assert "utilisation 0.90 and above is no longer blocked: one death by CgroupOOM" in text
    assert "the length is never touched: spec.tuning.maxModelLen is not set" in text
    assert "tuning.mode is Off" in text


def test_explain_shows_what_advise_would_do() -> None:
    status = copy.deepcopy(STATUS)
    status["tuning"]["target"] = {"maxModelLen": 2048, "gpuMemoryUtilization": 0.82}
    text = explained(view(status, tuning={"mode": "Advise"}))
    assert "Auto would put length 2048 and utilisation 0.82 in force" in text


def test_explain_names_the_last_death_and_a_spec_that_cannot_be_read() -> None:
    death = {"class": "CgroupOOM", "pod": "assistant-0", "message": "killed", "time": time(NOW)}
    text = explained(view({**STATUS, "failures": {"last": death}}, drain="soon"))
    assert "last death: CgroupOOM of assistant-0: killed" in text
    assert "cannot be read: spec.drain is soon" in text


# pin


def test_pin_prints_what_is_in_force_as_a_patch() -> None:
    text = pin.render(view(), NOW)
    assert yaml.safe_load(text) == {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "assistant", "namespace": "default"},
        "spec": {
            "engine": {
                "gpuMemoryUtilization": 0.84,
                "maxModelLen": 4096,
                "maxNumSeqs": 16,
                "maxNumBatchedTokens": 256,
            },
            "tuning": {"mode": "Off", "maxModelLen": {"maxAllowed": 4096}},
        },
    }
    assert "# In force on default/assistant at 2027-01-15 08:00:00Z, source Tuned." in text
    assert "kubectl patch llmd assistant -n default --type merge --patch-file FILE" in text
    flags = "gpuMemoryUtilization 0.85 -> 0.84, maxModelLen 8192 -> 4096, maxNumBatchedTokens"
    assert f"It replaces the pods once, since these are start flags: {flags}" in text


def test_pin_of_the_specs_own_values_replaces_nothing() -> None:
    status = copy.deepcopy(STATUS)
    status["effective"] |= {"maxModelLen": 8192, "gpuMemoryUtilization": 0.85}
    status["effective"]["maxNumBatchedTokens"] = 2048
    assert "replaces the pods" not in pin.render(view(status), NOW)


def test_pin_warns_of_what_is_moving() -> None:
    detail = [{"pod": "assistant-0", "maxModelLen": 4096}]
    text = pin.render(view({**STATUS, "replicasDetail": detail, "observedGeneration": 0}), NOW)
    assert "# The replicas differ at this moment" in text
    assert "# The operator has not answered the present spec yet." in text


def test_pin_of_nothing_is_refused() -> None:
    with pytest.raises(CommandError, match="nothing is in force yet"):
        pin.render(view(None), NOW)
    with pytest.raises(CommandError, match="the spec cannot be read"):
        pin.render(view(drain="soon"), NOW)


def with_lane() -> Json:
    changed = copy.deepcopy(STATUS)
    lane = {"watermark": 0.02, "longPromptTokens": 2048, "longPromptShare": 0.5}
    changed["tuning"]["current"] = {"maxModelLen": 4096, "gpuMemoryUtilization": 0.84, **lane}
    return changed


def test_limits_without_a_word_in_the_spec_are_explained_and_pinned_as_flags() -> None:
    text = explained(view(with_lane()))
    assert "prompts of more than 2048 tokens hold at most 50% of the cache together" in text
    assert "an admission leaves 2.0% of the cache free" in text
    own = {"maxModelLen": 8192, "extraArgs": ["--watermark=0.05", "--seed=1"]}
    engine = yaml.safe_load(pin.render(view(with_lane(), engine=own), NOW))["spec"]["engine"]
    assert engine["extraArgs"] == [
        "--watermark=0.05",
        "--seed=1",
        "--long-prompt-tokens=2048",
        "--long-prompt-share=0.5",
    ]


def test_every_limit_that_moves_has_its_name() -> None:
    moved = copy.deepcopy(STATUS)
    for parameter, before, after in (("maxNumSeqs", 256, 128), ("longPromptShare", 0.5, 0.25)):
        entry = {**LOWERED, "parameter": parameter, "from": before, "to": after}
        moved["tuning"]["history"] = [entry]
        (row,) = top.build_rows([resource(moved)], NOW)
        form = f"{before} -> {after}" if before > 1 else "0.50 -> 0.25"
        assert row.last == f"2m ago: {parameter} {form}"


# hold and resume


def applied(body: Json, patch: mode.Patch) -> Json:
    """A merge patch on what it is about."""
    assert patch.body is not None
    changed = copy.deepcopy(body)
    annotations = changed["metadata"].setdefault("annotations", {})
    for key, value in patch.body["metadata"]["annotations"].items():
        annotations.pop(key, None)
        if value is not None:
            annotations[key] = value
    tuning = changed["spec"].setdefault("tuning", {})
    tuning.pop("mode", None)
    if patch.body["spec"]["tuning"]["mode"] is not None:
        tuning["mode"] = patch.body["spec"]["tuning"]["mode"]
    return changed


@pytest.mark.parametrize("before", ["Auto", "Advise", "Off", None])
def test_resume_goes_back_to_the_mode_before(before: str | None) -> None:
    body = resource(tuning={} if before is None else {"mode": before})
    held = mode.hold(body)
    assert f"tuning.mode was {before or 'not set (Auto)'}, now Hold" in held.text
    on_hold = applied(body, held)
    assert on_hold["spec"]["tuning"]["mode"] == "Hold"
    resumed = mode.resume(on_hold)
    assert f"tuning.mode was Hold, now {before or 'not set (Auto)'}" in resumed.text
    back = applied(on_hold, resumed)
    assert back["spec"]["tuning"].get("mode") == before
    assert back["metadata"]["annotations"] == {}


def test_hold_twice_keeps_the_first_mode() -> None:
    on_hold = applied(resource(), mode.hold(resource()))
    again = mode.hold(on_hold)
    assert again.body is None
    assert again.text == "default/assistant is on Hold already; before it was Auto"


def test_a_patch_is_of_the_object_as_it_was_read() -> None:
    patch = mode.hold(resource())
    assert patch.body is not None
    assert patch.body["metadata"]["resourceVersion"] == "1"


def test_resume_of_what_is_not_on_hold_does_nothing() -> None:
    patch = mode.resume(resource())
    assert (patch.body, patch.text) == (
        None,
        "default/assistant is not on Hold: tuning.mode is Auto",
    )


# On Hold by another hand, or with an annotation that is no mode.
@pytest.mark.parametrize("annotation", [None, "Hold", "anything"])
def test_resume_without_a_record_asks_for_the_mode(annotation: str | None) -> None:
    body = resource(tuning={"mode": "Hold"})
    if annotation is not None:
        body["metadata"]["annotations"] = {mode.MODE_ANNOTATION: annotation}
    with pytest.raises(CommandError, match=r"say it: --mode Off \| Advise"):
        mode.resume(body)
    patch = mode.resume(body, TuningMode.AUTO)
    assert patch.body is not None
    assert patch.body["spec"]["tuning"]["mode"] == "Auto"
    with pytest.raises(CommandError, match="--mode is Hold; allowed: Off, Advise"):
        mode.resume(body, TuningMode.HOLD)


def test_a_lane_before_vllm_is_no_flag_of_its_and_the_line_is_explained() -> None:
    runtime = {"name": "VLLM", "image": "vllm/vllm-openai:v0.11.0"}
    status = copy.deepcopy(STATUS)
    status["tuning"]["current"] = {"longPromptTokens": 2048, "longPromptShare": 0.5}
    seen = read_view(resource(status, runtime=runtime))
    assert "extraArgs" not in pin.build_pin(seen)["spec"]["engine"]
    text = explain.render(seen, explain.explain(seen, None, None, NOW))
    assert "vLLM reads utilisation and batch when it starts" in text
    assert "utilisation may be" not in text
