"""Case B14: a failed allocation loses blocks, then all stop."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from plimsoll_engine.config import EngineConfig
from plimsoll_engine.executor import StepBatch
from plimsoll_engine.reports import FinishReason
from support.loop_harness import LoopHarness

REPETITIONS = 200


def script(request_id: str, position: int) -> int:
    return (100 if request_id.startswith("a") else 500) + position


def build_harness() -> LoopHarness:
    # All prompts here are alike: with their blocks shared there would be room for both.
    config = EngineConfig(model="m", block_size=4, max_model_len=24, enable_prefix_caching=False)
    harness = LoopHarness(8, config=config, script=script)
    assert harness.loop.snapshot().usable_blocks == 8
    return harness


def undisturbed(request_id: str) -> list[int]:
    harness = build_harness()
    harness.submit(request_id, 12, 12)
    harness.run()
    assert harness.final(request_id).preemptions == 0
    return harness.tokens(request_id)


def test_two_requests_that_together_need_more_than_the_pool_both_end_well() -> None:
    harness = build_harness()
    for repetition in range(REPETITIONS):
        before = harness.loop.snapshot().preemptions
        ids = [f"a{repetition}", f"b{repetition}"]
        for request_id in ids:
            harness.submit(request_id, 12, 12)
        harness.step()
        assert harness.loop.snapshot().running == 2
        # Every step is checked: free and owned blocks are 8, and no block has two owners.
        harness.run()
        for request_id in ids:
            assert harness.final(request_id).finish_reason is FinishReason.LENGTH
            assert harness.tokens(request_id) == undisturbed(request_id)
        assert harness.loop.snapshot().preemptions > before
    end = harness.loop.snapshot()
    assert (end.used_blocks, end.kv_cache_usage, end.running, end.waiting) == (0, 0.0, 0, 0)
    assert end.usable_blocks == end.committed_blocks == 8


@pytest.mark.parametrize("victim", ["a", "b"])
@pytest.mark.parametrize("moment", ["before", "within", "after"])
def test_an_abort_in_the_step_of_the_preemption_loses_nothing(victim: str, moment: str) -> None:
    """Just before the step that preempts, while it executes, and just after it."""
    harness = build_harness()
    for repetition in range(REPETITIONS):
        aborted, other = f"{victim}{repetition}", f"{'b' if victim == 'a' else 'a'}{repetition}"
        for request_id in sorted([aborted, other]):
            harness.submit(request_id, 12, 12)
        # Each prompt fills three blocks; both take a fourth for output, and in the sixth step the
        # first asks for a ninth block.
        for _ in range(5):
            harness.step()
        preemptions = harness.loop.snapshot().preemptions
        if moment == "before":
            harness.loop.abort(aborted)
        elif moment == "within":
            harness.executor.before_step = aborting(harness, aborted)
        harness.step()
        if moment != "before":
            assert harness.loop.snapshot().preemptions == preemptions + 1
        if moment == "after":
            harness.loop.abort(aborted)
        harness.executor.before_step = None
        harness.loop.check()
        harness.run()
        assert harness.final(aborted).finish_reason is FinishReason.ABORT
        assert harness.final(other).finish_reason is FinishReason.LENGTH
        assert harness.tokens(other) == undisturbed(other)
    end = harness.loop.snapshot()
    assert (end.used_blocks, end.running, end.waiting) == (0, 0, 0)


def aborting(harness: LoopHarness, request_id: str) -> Callable[[StepBatch], None]:
    return lambda batch: harness.loop.abort(request_id)
