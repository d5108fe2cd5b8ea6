"""Requests that a shrink catches: what was accepted runs to its end, whatever state it is in and
whichever limit moves; only one whose memory is gone before it could enter is told to come again. None
is ever told 400 for a length within the ceiling."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from plimsoll_engine.admission import Lengths, RefusalReason, judge
from plimsoll_engine.config import EngineConfig
from plimsoll_engine.limits import Limits, LimitsOutcome
from plimsoll_engine.reports import FinishReason
from support.engine_server import ApiServer, api_server
from support.loop_harness import LoopHarness
from support.scripted_executor import ScriptedExecutor, count_up, figures

PROMPT, OUTPUT = 100, 20
MIB = 1 << 20


def utilization_of(executor: ScriptedExecutor, blocks: int) -> float:
    f = executor.figures
    return (f.weights + f.activations + f.runtime + (blocks + 0.5) * f.bytes_per_block) / f.total


def enter_waiting(harness: LoopHarness) -> None:
    harness.loop.move_limits(1, Limits(max_num_seqs=1))
    harness.submit("other", 10, 30)
    harness.step()
    harness.submit("caught", PROMPT, OUTPUT)
    harness.step()
    assert harness.loop.snapshot().waiting == 1


def enter_lane(harness: LoopHarness) -> None:
    harness.loop.move_limits(1, Limits(long_prompt_tokens=50, long_prompt_share=0.3))
    harness.submit("other", 90, 30)
    harness.step()
    harness.submit("caught", PROMPT, OUTPUT)
    harness.step()
    assert harness.loop.snapshot().long_wait > 0


def enter_prefill(harness: LoopHarness) -> None:
    harness.loop.move_limits(1, Limits(max_num_batched_tokens=16))
    harness.submit("caught", PROMPT, OUTPUT)
    harness.step()
    assert harness.loop.snapshot().running == 1
    assert not harness.tokens("caught")


def enter_running(harness: LoopHarness) -> None:
    harness.submit("caught", PROMPT, OUTPUT)
    harness.step()
    harness.step()
    assert len(harness.tokens("caught")) == 2


def enter_preempted(harness: LoopHarness) -> None:
    harness.loop.move_limits(
        1, Limits(gpu_memory_utilization=utilization_of(harness.executor, 16), watermark=0.0)
    )
    harness.submit("other", 126, 40, priority=-1)
    harness.submit("caught", PROMPT, OUTPUT)
    while not harness.loop.snapshot().preemptions:
        harness.step()
    assert harness.loop.snapshot().waiting == 1
    assert harness.tokens("caught")


def enter_judged(harness: LoopHarness) -> None:
    """Accepted by the limits before, and received behind the move: see ``submitted_late``."""


STATES: dict[str, Callable[[LoopHarness], None]] = {
    "waits": enter_waiting,
    "waits for the lane": enter_lane,
    "in its prompt": enter_prefill,
    "in its output": enter_running,
    "preempted": enter_preempted,
    "accepted and not received": enter_judged,
}
MOVES: dict[str, Callable[[ScriptedExecutor], Limits]] = {
    "length": lambda executor: Limits(max_model_len=64),
    "length and pool": lambda executor: Limits(
        max_model_len=64, gpu_memory_utilization=utilization_of(executor, 4)
    ),
    "sequences": lambda executor: Limits(max_num_seqs=1),
    "batch": lambda executor: Limits(max_num_batched_tokens=16),
    "lane": lambda executor: Limits(long_prompt_tokens=8, long_prompt_share=0.1),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("state", STATES)
def test_what_was_accepted_runs_to_its_end(state: str, move: str) -> None:
    harness = LoopHarness(
        32,
        config=EngineConfig(model="m", block_size=16, max_model_len=256, max_num_seqs=8),
    )
    STATES[state](harness)
    before = harness.loop.admission_state()
    asked = MOVES[move](harness.executor)
    result = harness.loop.move_limits(2, asked)
    assert result.outcome is not LimitsOutcome.REJECTED, result.reason
    if state == "accepted and not received":
        harness.submit("caught", PROMPT, OUTPUT)
    # Its like are told to come again while the length is below theirs, and never 400.
    refusal = judge(harness.loop.admission_state(), [Lengths(PROMPT, OUTPUT)])
    assert judge(before, [Lengths(PROMPT, OUTPUT)]) is None
    assert (refusal and refusal.status) == (429 if asked.max_model_len else None)
    harness.run()
    harness.step()
    assert harness.final("caught").finish_reason is FinishReason.LENGTH
    assert harness.tokens("caught") == [count_up("", position) for position in range(OUTPUT)]
    assert harness.loop.snapshot().limits_outcome is LimitsOutcome.APPLIED


class Squeezed(ScriptedExecutor):
    """A device whose memory a neighbour takes as soon as the pool gives it back.

    ``in_between`` runs when the pool shrinks: its limits have moved, and nobody can know it yet.
    """

    in_between: Callable[[], None] | None = None

    def resize_kv(self, num_blocks: int) -> int:
        if num_blocks < self.committed and self.in_between is not None:
            self.in_between()
        committed = super().resize_kv(num_blocks)
        self.bytes_elsewhere += self.memory().free if self.in_between else 0
        return committed


@pytest.mark.parametrize("stream", [False, True])
def test_one_whose_memory_is_gone_is_told_to_come_again(stream: bool) -> None:
    executor = Squeezed(memory_figures=figures(32))
    with api_server(max_model_len=256, executor=executor) as server:
        body = {"model": "m", "prompt": [97] * PROMPT, "max_tokens": OUTPUT, "stream": stream}
        answers: list[Any] = []
        client = threading.Thread(target=lambda: answers.append(ask(server, body)))

        def submit() -> None:
            client.start()
            while not server.core.snapshot().waiting:
                assert client.is_alive()

        executor.in_between = submit
        asked = Limits(max_model_len=64, gpu_memory_utilization=utilization_of(executor, 4))
        server.core.set_limits(1, asked)
        client.join(20)
        ((status, retry_after, error),) = answers
        # A stream has begun: its error is an event.
        assert (status, retry_after) == ((200, None) if stream else (429, "5"))
        assert (error["code"], error["type"]) == (429, "RateLimitError")
        assert "up to 256 at other times" in error["message"]
        assert server.core.snapshot().refused[RefusalReason.OVER_ADMITTED_LENGTH] == 1
        # The answer may come before the step that told of it has been counted; the test's timeout ends it.
        while server.core.snapshot().waiting:
            time.sleep(0.01)
        assert server.complete(prompt="hi", max_tokens=2)["usage"]["completion_tokens"] == 2


def ask(server: ApiServer, body: dict[str, Any]) -> tuple[int, str | None, dict[str, Any]]:
    if body["stream"]:
        (event,) = server.stream(**body)
        return 200, None, event["error"]
    response = server.client.post("/v1/completions", json=body)
    return response.status_code, response.headers.get("retry-after"), response.json()["error"]
