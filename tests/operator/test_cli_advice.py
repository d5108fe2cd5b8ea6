"""`kubectl plimsoll advice`: a table, and one advisor in plain words."""

from __future__ import annotations

from typing import Any

from plimsoll_operator.cli import advice
from support.advising import Scene, advisor_body, vllm_page

Json = dict[str, Any]


def busy() -> Scene:
    scene = Scene()
    scene.see()
    for _ in range(3):
        scene.see(usage=0.99, waiting=30, running=100, preemptions=10.0 * scene.passes)
    return scene


def told(scene: Scene) -> str:
    sections = advice.explain(scene.resource, scene.now)
    return advice.render(scene.resource, sections)


def test_a_line_has_what_is_known() -> None:
    (row,) = advice.build_rows([busy().resource])
    assert row == advice.Row(
        "default", "advisor", "Deployment vllm", "Ready", "1/1", 32768, 0.92, 99, 0,
        "--max-num-seqs=80",
    )  # fmt: skip


def test_a_new_advisor_and_a_status_by_hand_are_unknown() -> None:
    for status in (None, {"current": 3, "recommendation": {"summary": 1}, "load": {"time": "x"}}):
        resource = advisor_body()
        if status is not None:
            resource["status"] = status
        (row,) = advice.build_rows([resource])
        assert (row.state, row.pods, row.length, row.ooms, row.advice) == ("?", *[None] * 4)
        assert "Deployment vllm: ? pods" in told(Scene(resource))


def test_one_is_explained_from_what_is_read_to_what_was_advised() -> None:
    text = told(busy())
    for words in (
        "Deployment vllm: 1/1 pods",
        "15s ago: the fullest KV cache was 99 % full",
        "not on every page: vllm:request_queue_time_seconds_count",
        "gpuMemoryUtilization 0.92, by its flag",
        "cacheTokens 41408, by its page",
        "vLLM: --max-num-seqs=80",
        "with the gate before it: --long-prompt-tokens=8192 --long-prompt-share=0.7",
        "30 preemptions",
        "--max-num-seqs=80 (preemption, once), it stands: vllm-5d8f-abcde: cache 99% full",
    ):
        assert words in text, text


def test_trouble_is_told_and_what_is_usual_is_not() -> None:
    scene = busy()
    scene.see({"vllm-5d8f-abcde": vllm_page().replace("vllm:num_requests_waiting", "gone")})
    text = told(scene)
    assert "MetricsAvailable False (MetricMissing)" in text
    assert "TargetFound" not in text
