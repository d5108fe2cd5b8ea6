"""Admission by the peak of all that run: S10 and O2."""

from __future__ import annotations

import pytest

from plimsoll_engine.blocks import BlockPool
from plimsoll_engine.scheduler import SchedulerLimits
from plimsoll_simulator.foresight import PastOutputs, PeakScheduler, know, peak_tokens
from support.loop_harness import build_request


@pytest.mark.parametrize(
    ("requests", "peak", "why"),
    [
        ([], 0, "nothing"),
        ([(10, 5)], 15, "one at its end"),
        ([(10, 5), (20, 0)], 30, "the second ends now: that is the peak"),
        ([(10, 5), (10, 5)], 30, "both end together"),
        ([(10, 100), (50, 1)], 110, "the first alone, later, is more than both now"),
        ([(50, 10), (50, 8), (50, 1)], 153, "the shortest ends first, with all three there"),
    ],
)
def test_the_peak_is_where_one_ends(requests: list[tuple[int, int]], peak: int, why: str) -> None:
    assert peak_tokens(requests) == peak, why


def test_who_is_admitted_with_true_outputs_is_never_preempted() -> None:
    pool = BlockPool(8)
    limits = SchedulerLimits(max_num_seqs=9, max_num_batched_tokens=64)
    scheduler = PeakScheduler(pool, 4, limits, know)
    for name in ("a", "b", "c"):
        scheduler.add(build_request(name, 6, 10))
    # Each comes to 4 blocks, or 16 tokens: two fit, though the prompts of all three would.
    ended: list[str] = []
    while len(ended) < 3:
        step = scheduler.schedule()
        assert not step.preempted
        assert len(scheduler.running) <= 2
        sampled = {
            c.sequence.request_id: 7
            for c in step.chunks
            if c.start + c.count == len(c.sequence.tokens)
        }
        scheduler.complete(step, sampled)
        for sequence in tuple(scheduler.running):
            if sequence.num_output_tokens == 10:
                scheduler.finish(sequence)
                ended.append(sequence.request_id)
        scheduler.check()
    assert ended == ["a", "b", "c"]


def test_past_outputs_are_drawn_among_the_longer_ones_and_the_same_each_time() -> None:
    past = PastOutputs()
    scheduler = PeakScheduler(
        BlockPool(8), 4, SchedulerLimits(max_num_seqs=9, max_num_batched_tokens=64), past.draw
    )
    sequence = scheduler.add(build_request("a", 6, 10))
    assert past.draw(sequence) == 1
    for length in range(5, 105, 5):
        past.add(length)
    first = past.draw(sequence)
    assert first == past.draw(sequence)
    assert first in range(5, 105, 5)
    sequence.tokens += [7] * 90
    assert past.draw(sequence) in (95, 100)
    sequence.tokens += [7] * 10
    assert past.draw(sequence) == 101
