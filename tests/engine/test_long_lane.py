"""The lane of long prompts: who enters beside whom, who passes whom, and that nobody starves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll_engine.admission import LongQueue
from plimsoll_engine.blocks import BlockPool
from plimsoll_engine.scheduler import ScheduledStep, Scheduler, SchedulerLimits
from plimsoll_engine.sequence import Sequence
from support.loop_harness import build_request

BLOCK = 4
# In tokens: with three and more blocks a prompt is long here.
LONG = 8


class Lane:
    """Drives a scheduler with a lane; every executed step samples a token where one is due."""

    def __init__(self, num_blocks: int, **limits: float) -> None:
        self.pool = BlockPool(num_blocks)
        start = SchedulerLimits(
            max_num_seqs=16,
            max_num_batched_tokens=256,
            long_prompt_tokens=LONG,
            long_prompt_share=0.5,
        )
        self.scheduler = Scheduler(self.pool, BLOCK, replace(start, **limits))  # type: ignore[arg-type]
        self.sequences: dict[str, Sequence] = {}

    def add(self, *sizes: tuple[str, int, int], priority: int = 0) -> None:
        for name, prompt, output in sizes:
            request = build_request(name, prompt, output, priority=priority)
            self.sequences[name] = self.scheduler.add(request)

    def move(self, **limits: float | None) -> None:
        self.scheduler.limits = replace(self.scheduler.limits, **limits)  # type: ignore[arg-type]

    def step(self) -> ScheduledStep:
        step = self.scheduler.schedule()
        self.scheduler.check()
        self.check_lane(step)
        waiting = sum(len(sequence.tokens) for sequence in self.scheduler.waiting)
        assert self.scheduler.num_waiting_tokens == waiting
        sampled = {
            chunk.sequence.request_id: 7
            for chunk in step.chunks
            if chunk.start + chunk.count == len(chunk.sequence.tokens)
        }
        self.scheduler.complete(step, sampled)
        for chunk in step.chunks:
            if chunk.sequence.num_output_tokens == chunk.sequence.params.max_tokens:
                self.scheduler.finish(chunk.sequence)
        self.scheduler.check()
        return step

    def check_lane(self, step: ScheduledStep) -> None:
        """Whoever entered the lane found room in it, or nobody."""
        if any(self.is_long(s) for s in step.admitted):
            alone = sum(map(self.is_long, self.scheduler.running)) == 1
            assert alone or self.scheduler.lane_blocks <= self.scheduler.lane_capacity

    def is_long(self, sequence: Sequence) -> bool:
        threshold = self.scheduler.limits.long_prompt_tokens
        return threshold is not None and sequence.num_prompt_tokens > threshold

    def run(self, max_steps: int) -> int:
        for taken in range(max_steps):
            if not self.running and not self.waiting:
                return taken
            self.step()
        raise AssertionError(f"{self.running} run and {self.waiting} wait after {max_steps} steps")

    @property
    def running(self) -> list[str]:
        return [sequence.request_id for sequence in self.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        return [sequence.request_id for sequence in self.scheduler.waiting]


@dataclass(frozen=True)
class Entry:
    reason: str
    limits: Mapping[str, float]
    # (name, prompt, output) in order of arrival, into a pool of 16 blocks of 4 tokens
    requests: list[tuple[str, int, int]]
    running: list[str]


ENTRIES = [
    Entry(
        "two long ones within half of the pool enter together",
        *({}, [("L1", 16, 4), ("L2", 16, 4)], ["L1", "L2"]),
    ),
    Entry(
        "the second waits when both would hold more, and a short one passes it",
        *({}, [("L1", 16, 4), ("L2", 20, 4), ("s", 4, 4)], ["L1", "s"]),
    ),
    Entry(
        "alone, a long one may hold more than the share",
        *({}, [("L1", 48, 4), ("s", 4, 4)], ["L1", "s"]),
    ),
    Entry(
        "a short one passes a long one that does not fit the free blocks",
        *({}, [("a", 8, 4), ("b", 8, 4), ("L1", 56, 4), ("s", 4, 4)], ["a", "b", "s"]),
    ),
    Entry(
        "but none of another priority does",
        *({}, [("a", 8, 4), ("b", 8, 4), ("L1", 56, 4), ("low", 4, 4)], ["a", "b"]),
    ),
    Entry(
        "the long ones do not pass each other",
        *({}, [("L1", 16, 4), ("L2", 20, 4), ("L3", 12, 4)], ["L1"]),
    ),
    Entry(
        "a share of 1 is one queue for all",
        *({"long_prompt_share": 1.0}, [("a", 8, 4), ("L1", 60, 4), ("s", 4, 4)], ["a"]),
    ),
]


@pytest.mark.parametrize("case", ENTRIES, ids=lambda case: case.reason)
def test_entry(case: Entry) -> None:
    lane = Lane(16, **case.limits)
    for size in case.requests:
        lane.add(size, priority=1 if size[0] == "low" else 0)
    lane.step()
    assert lane.running == case.running


def test_without_a_length_nothing_is_long() -> None:
    lane = Lane(16)
    lane.move(long_prompt_tokens=None)
    lane.add(("L1", 16, 4), ("L2", 52, 4), ("s", 4, 4))
    lane.step()
    assert lane.running == ["L1"]
    assert lane.waiting == ["L2", "s"]


def test_those_that_pass_have_the_pool_outside_the_lane_once_and_no_more() -> None:
    lane = Lane(16, long_prompt_share=0.75)
    lane.add(("a", 8, 16), ("b", 8, 16), ("c", 4, 16), ("L1", 48, 4))
    lane.step()
    # L1 fits the lane but not beside the others: those that pass may have 4 blocks, one each.
    for arrival in range(8):
        lane.add((f"s{arrival}", 4, 1))
        lane.step()
    assert lane.sequences["L1"].overtaken_by == 4
    assert lane.running == ["a", "b", "c"]
    assert lane.waiting == ["L1", "s4", "s5", "s6", "s7"]
    entered = [s.request_id for _ in range(20) for s in lane.step().admitted]
    # c, preempted meanwhile, came before L1.
    assert entered[:3] == ["c", "L1", "s4"]


def test_waiting_for_the_lane_is_not_counted_as_being_overtaken() -> None:
    lane = Lane(16)
    lane.add(("L1", 28, 40), ("L2", 16, 4))
    for arrival in range(20):
        lane.add((f"s{arrival}", 4, 1))
        lane.step()
    assert lane.waiting == ["L2"]
    assert lane.sequences["L2"].overtaken_by == 0


def test_short_prompts_are_computed_before_a_long_one_that_keeps_its_quarter() -> None:
    lane = Lane(64, max_num_batched_tokens=16)
    lane.add(("L1", 60, 4))
    assert counts(lane.step()) == {"L1": 16}
    lane.add(("s1", 8, 1), ("s2", 8, 1), ("s3", 2, 1))
    assert counts(lane.step()) == {"s1": 8, "s2": 4, "L1": 4}
    assert counts(lane.step()) == {"s2": 4, "s3": 2, "L1": 10}
    assert counts(lane.step()) == {"L1": 16}


def test_the_next_long_prompt_enters_when_the_one_before_is_computed_and_is_passed_till_then() -> (
    None
):
    lane = Lane(64, max_num_batched_tokens=16, long_prompt_share=0.9)
    lane.add(("L1", 40, 9), ("L2", 12, 1))
    lane.step()
    lane.add(("s", 4, 9))
    lane.step()
    assert lane.running == ["L1", "s"]
    assert lane.sequences["L2"].overtaken_by == 0
    # One token for s, twelve for the rest of L1, and L2 has what is left.
    assert counts(lane.step()) == {"s": 1, "L1": 12, "L2": 3}


def test_without_a_lane_prompts_are_computed_in_their_order() -> None:
    lane = Lane(64, max_num_batched_tokens=16, long_prompt_share=1.0)
    lane.move(long_prompt_tokens=None)
    lane.add(("L1", 60, 4))
    lane.step()
    lane.add(("s", 8, 1))
    assert counts(lane.step()) == {"L1": 16}


def counts(step: ScheduledStep) -> dict[str, int]:
    return {chunk.sequence.request_id: chunk.count for chunk in step.chunks}


def test_a_preempted_long_request_keeps_its_place_and_what_it_was_overtaken_by() -> None:
    lane = Lane(8, long_prompt_share=0.75)
    lane.add(("a", 8, 20), ("L1", 16, 12))
    preempted = [s.request_id for _ in range(12) for s in lane.step().preempted]
    assert preempted == ["L1"]
    lane.sequences["L1"].overtaken_by = 2
    lane.add(("s", 4, 1))
    lane.step()
    # Two blocks are outside the lane, and it has been passed by two.
    assert lane.waiting == ["L1", "s"]


def test_a_lowered_share_ends_no_running_request_and_holds_for_the_next() -> None:
    lane = Lane(16)
    lane.add(("L1", 16, 8), ("L2", 16, 8))
    lane.step()
    lane.move(long_prompt_share=0.25)
    lane.add(("L3", 12, 4), ("s", 4, 4))
    lane.step()
    assert lane.running == ["L1", "L2", "s"]
    lane.run(100)


def test_a_moved_length_sorts_those_that_wait_anew() -> None:
    lane = Lane(16, max_num_seqs=1)
    lane.add(("a", 4, 9), ("L1", 16, 4), ("L2", 48, 4), ("s", 4, 4))
    lane.step()
    lane.move(long_prompt_tokens=32, max_num_seqs=16)
    assert lane.waiting == ["L1", "L2", "s"]
    lane.step()
    # L1 is short now, L2 is alone in the lane but does not fit, and s passes it.
    assert lane.running == ["a", "L1", "s"]


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1.0])
def test_under_a_flood_of_both_kinds_both_go_on(share: float) -> None:
    lane = Lane(16, long_prompt_share=share, max_num_batched_tokens=32)
    waits: dict[str, int] = {}
    for step in range(400):
        # Far more than can be served: the queues only grow.
        lane.add((f"s{step}", 5, 6))
        if step % 4 == 0:
            lane.add((f"L{step}", 30, 6))
        waits |= {s.request_id: step for s in lane.step().admitted}
    entered_short = [name for name in waits if name.startswith("s")]
    entered_long = [name for name in waits if name.startswith("L")]
    # Within each kind nobody is passed over: those that entered are the first that came.
    assert entered_short == [f"s{n}" for n in range(len(entered_short))]
    assert entered_long == [f"L{4 * n}" for n in range(len(entered_long))]
    assert len(entered_short) > 60
    assert len(entered_long) > 12


REQUESTS = st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 1))
MOVES = st.fixed_dictionaries(
    {
        "long_prompt_tokens": st.sampled_from([None, 4, 8, 20]),
        "long_prompt_share": st.sampled_from([0.1, 0.4, 0.7, 1.0]),
        "watermark": st.sampled_from([0.0, 0.2]),
        "max_num_seqs": st.integers(1, 6),
    }
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    events=st.lists(
        st.one_of(REQUESTS, MOVES, st.integers(16, 24), st.none()), min_size=1, max_size=60
    )
)
def test_any_flow_with_moving_limits_keeps_the_lane_and_ends(
    events: list[tuple[int, int, int] | dict[str, float] | int | None],
) -> None:
    """Requests, moved limits, a moved pool, and steps, in any order; each long request is
    overtaken by no more than the pool outside the lane and the last that passed."""
    lane = Lane(24)
    for number, event in enumerate(events):
        match event:
            case (prompt, output, priority):
                lane.add((str(number), prompt, output), priority=priority)
            case dict():
                lane.move(**event)
            case int():
                lane.pool.set_usable(event)
        overtaken = {name: s.overtaken_by for name, s in lane.sequences.items()}
        allowed = lane.pool.usable - lane.scheduler.lane_capacity
        step = lane.step()
        largest = max((len(s.blocks) for s in step.admitted), default=0)
        for name, before in overtaken.items():
            after = lane.sequences[name].overtaken_by
            assert after == before or after < allowed + max(largest, 10)
    lane.run(2000)
    assert all(s.num_output_tokens == s.params.max_tokens for s in lane.sequences.values())
    assert lane.pool.free == lane.pool.usable


@pytest.mark.parametrize(("beyond", "enters"), [(0, True), (1, False)])
def test_the_free_part_of_the_lane_is_what_the_next_long_one_may_take(
    beyond: int, enters: bool
) -> None:
    lane = Lane(32)
    assert lane.scheduler.free_lane_blocks == 32
    lane.add(("L1", 16, 20))
    # The second step gives it a block for what it generates, with room for the third.
    lane.step()
    lane.step()
    room = lane.scheduler.free_lane_blocks
    assert 0 < room < 16
    lane.add(("L2", room * BLOCK + beyond, 1))
    assert bool(lane.step().admitted) is enters


def test_what_the_scheduler_says_of_long_prompts_that_wait() -> None:
    lane = Lane(16, long_prompt_share=0.5)
    assert lane.scheduler.long_queue is None
    lane.move(long_queue_share=0.25)
    assert lane.scheduler.long_queue == LongQueue(LONG, waiting=0, room=64, most=16)
    lane.add(("L1", 20, 8), ("short", 4, 8), ("L2", 16, 8), ("L3", 12, 8))
    lane.step()
    lane.step()
    # L1 has 6 of the lane's 8 blocks: its prompt's and one for output.
    assert lane.scheduler.lane_blocks == 6
    assert lane.scheduler.long_queue == LongQueue(LONG, waiting=28, room=8, most=16)
    lane.move(long_prompt_tokens=None)
    assert lane.scheduler.long_queue is None
