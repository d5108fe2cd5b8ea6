"""The scheduler's rules as tables: what waits and runs, one step, what it computes and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from plimsoll_engine.blocks import BlockPool
from plimsoll_engine.scheduler import ScheduledStep, Scheduler, SchedulerLimits
from plimsoll_engine.sequence import Sequence
from support.loop_harness import build_request

BLOCK = 4


class Bench:
    """Drives a scheduler; every executed step samples token 7 where one is due."""

    def __init__(self, num_blocks: int, **limits: float) -> None:
        self.pool = BlockPool(num_blocks)
        wide = SchedulerLimits(max_num_seqs=16, max_num_batched_tokens=64)
        self.scheduler = Scheduler(self.pool, BLOCK, replace(wide, **limits))  # type: ignore[arg-type]
        self.sequences: dict[str, Sequence] = {}

    def add(self, *sizes: tuple[str, int, int], priority: int = 0) -> None:
        for name, prompt, output in sizes:
            request = build_request(name, prompt, output, priority=priority)
            self.sequences[name] = self.scheduler.add(request)

    def schedule(self, budget: int | None = None) -> ScheduledStep:
        step = self.scheduler.schedule(budget)
        self.scheduler.check()
        return step

    def step(self, budget: int | None = None) -> dict[str, int]:
        """One executed step; tokens computed per request."""
        step = self.schedule(budget)
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
        return counts(step)

    @property
    def running(self) -> list[str]:
        return [sequence.request_id for sequence in self.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        return [sequence.request_id for sequence in self.scheduler.waiting]


def counts(step: ScheduledStep) -> dict[str, int]:
    return {chunk.sequence.request_id: chunk.count for chunk in step.chunks}


@dataclass(frozen=True)
class Admission:
    reason: str
    blocks: int
    limits: Mapping[str, float]
    # (name, prompt, output) in order of arrival
    requests: list[tuple[str, int, int]]
    computed: dict[str, int]
    waiting: list[str]


ADMISSIONS = [
    Admission(
        "everything fits: all enter in the order of arrival",
        *(16, {}, [("a", 8, 4), ("b", 5, 4)]),
        *({"a": 8, "b": 5}, []),
    ),
    Admission(
        "the token budget cuts the last prompt; its blocks are reserved all the same",
        *(16, {"max_num_batched_tokens": 10}, [("a", 8, 4), ("b", 5, 4), ("c", 4, 4)]),
        *({"a": 8, "b": 2}, ["c"]),
    ),
    Admission(
        "a prompt enters only when all of it fits, and nobody passes it",
        *(5, {}, [("a", 12, 4), ("b", 12, 4), ("c", 4, 4)]),
        *({"a": 12}, ["b", "c"]),
    ),
    Admission(
        "max_num_seqs bounds the running",
        *(16, {"max_num_seqs": 1}, [("a", 4, 4), ("b", 4, 4)]),
        *({"a": 4}, ["b"]),
    ),
    Admission(
        "the watermark keeps blocks free beside running requests",
        *(10, {"watermark": 0.2}, [("a", 28, 4), ("b", 8, 4)]),
        *({"a": 28}, ["b"]),
    ),
    Admission(
        "but alone a request may take them",
        *(10, {"watermark": 0.2}, [("a", 40, 1)]),
        *({"a": 40}, []),
    ),
]


@pytest.mark.parametrize("case", ADMISSIONS, ids=lambda case: case.reason)
def test_admission(case: Admission) -> None:
    bench = Bench(case.blocks, **case.limits)
    bench.add(*case.requests)
    assert counts(bench.schedule()) == case.computed
    assert bench.waiting == case.waiting


def test_chunks_of_a_long_prompt_follow_each_other_up_to_its_last_token() -> None:
    bench = Bench(16, max_num_batched_tokens=16)
    bench.add(("a", 35, 2))
    assert [bench.step(), bench.step(), bench.step(), bench.step()] == [
        {"a": 16},
        {"a": 16},
        {"a": 3},
        {"a": 1},
    ]
    assert bench.pool.free == 16


def test_long_prompts_that_do_not_fit_together_are_computed_once_each() -> None:
    """Four that take the pool's better half each, in chunks: by turns, and not in rounds of
    preemption."""
    bench = Bench(16, max_num_batched_tokens=8)
    bench.add(*((name, 40, 4) for name in "abcd"))
    computed = 0
    while bench.running or bench.waiting:
        step = bench.step()
        assert step, "work, and nothing computed"
        computed += sum(step.values())
    # The last token of each is never computed.
    assert computed == 4 * (40 + 4 - 1)
    assert all(sequence.preemptions == 0 for sequence in bench.sequences.values())


def test_decoding_requests_go_before_a_long_prompt() -> None:
    bench = Bench(32, max_num_batched_tokens=16)
    bench.add(("a", 4, 8), ("long", 60, 2), ("b", 4, 8))
    assert bench.step() == {"a": 4, "long": 12}
    # b waits for a token of the budget, and a goes on although the prompt could take all of it.
    assert bench.step() == {"a": 1, "long": 15}


def test_priority_decides_the_queue_then_arrival() -> None:
    bench = Bench(32, max_num_seqs=2)
    bench.add(("late", 4, 4), priority=1)
    bench.add(("first", 4, 4), ("second", 4, 4))
    bench.step()
    assert bench.running == ["first", "second"]
    assert bench.waiting == ["late"]


def test_the_last_running_request_is_preempted_keeps_its_tokens_and_computes_them_again() -> None:
    bench = Bench(4)
    bench.add(("a", 8, 8), ("b", 8, 8))
    bench.step()
    # Both prompts fill their blocks; a takes b's for its ninth token.
    step = bench.schedule()
    assert counts(step) == {"a": 1}
    assert [s.request_id for s in step.preempted] == ["b"]
    assert bench.waiting == ["b"]
    b = bench.sequences["b"]
    assert (b.computed, b.blocks, len(b.tokens), b.preemptions) == (0, (), 9, 1)

    bench.scheduler.complete(step, {"a": 7})
    recomputed = 0
    while b.num_output_tokens < 2:
        step = bench.schedule()
        sampled = {
            chunk.sequence.request_id: 7
            for chunk in step.chunks
            if chunk.start + chunk.count == len(chunk.sequence.tokens)
        }
        recomputed += bench.scheduler.complete(step, sampled).recomputed_tokens
        for sequence in list(bench.scheduler.running):
            if sequence.num_output_tokens == 8:
                bench.scheduler.finish(sequence)
    assert recomputed == 8  # b's prompt; its first output token had not been computed yet


def test_a_preempting_step_admits_nobody() -> None:
    bench = Bench(6)
    bench.add(("a", 8, 8), ("b", 12, 8))
    bench.step()
    bench.add(("c", 4, 4))
    # One block is free; a takes it, b then has none and gives way itself: its three would do for c.
    step = bench.schedule()
    assert [s.request_id for s in step.preempted] == ["b"]
    assert not step.admitted
    assert bench.waiting == ["b", "c"]


def test_not_even_one_that_goes_before_the_victim_and_would_fit() -> None:
    bench = Bench(5)
    bench.add(("a", 8, 8))
    bench.add(("low", 12, 8), priority=1)
    bench.step()
    bench.add(("c", 4, 4))
    step = bench.schedule()
    assert counts(step) == {"a": 1}
    assert [s.request_id for s in step.preempted] == ["low"]
    assert bench.pool.free == 2
    assert bench.waiting == ["c", "low"]
    assert bench.schedule().admitted == (bench.sequences["c"],)


def test_one_preemption_per_step_however_many_are_short_of_blocks() -> None:
    bench = Bench(8)
    bench.add(*((name, 4, 8) for name in "abcdefgh"))
    bench.step()
    # Each of the eight needs a block and none is free. h's one goes to a; the others wait.
    step = bench.schedule()
    assert [s.request_id for s in step.preempted] == ["h"]
    assert counts(step) == {"a": 1}
    assert bench.running == list("abcdefg")


def test_a_preempted_request_comes_back_before_those_that_arrived_later() -> None:
    bench = Bench(4)
    bench.add(("a", 8, 4), ("b", 8, 4), ("c", 4, 4))
    bench.step()
    bench.step()
    assert bench.waiting == ["b", "c"]
    while "b" not in bench.running:
        bench.step()
    assert bench.waiting in (["c"], [])
    assert "c" not in bench.running or bench.running == ["b", "c"]


def test_a_smaller_budget_can_be_tried_again_with_nothing_lost() -> None:
    bench = Bench(16)
    bench.add(("a", 20, 4), ("b", 9, 4))
    # The device refused this step: it is never completed.
    assert counts(bench.schedule()) == {"a": 20, "b": 9}
    assert bench.step(budget=14) == {"a": 14}
    assert bench.step(budget=14) == {"a": 6, "b": 8}
    assert bench.step() == {"a": 1, "b": 1}


@pytest.mark.parametrize("state", ["waiting", "running", "prefilling", "preempted", "scheduled"])
def test_a_request_can_be_ended_in_every_state(state: str) -> None:
    bench = Bench(4, max_num_batched_tokens=16)
    bench.add(("a", 8, 8), ("b", 8, 8), ("c", 8, 8))
    victim = bench.sequences["b"]
    match state:
        case "waiting":
            pass
        case "prefilling":
            bench.step(budget=10)
            assert 0 < victim.computed < 8
        case "running":
            bench.step()
            assert victim.computed == 8
        case "preempted":
            bench.step()
            bench.step()
            assert victim.preemptions == 1
        case "scheduled":
            step = bench.schedule()
            bench.scheduler.finish(victim)
            bench.scheduler.complete(step, {"a": 7, "b": 7})
            bench.scheduler.check()
            assert victim.tokens == list(range(8))
    if state != "scheduled":
        bench.scheduler.finish(victim)
    bench.scheduler.check()
    assert "b" not in [*bench.running, *bench.waiting]
    while bench.running or bench.waiting:
        bench.step()
    assert bench.pool.free == 4


def test_a_lowered_batch_width_ends_no_running_request() -> None:
    bench = Bench(16)
    bench.add(("a", 4, 8), ("b", 4, 8), ("c", 4, 8))
    bench.step()
    bench.scheduler.limits = replace(bench.scheduler.limits, max_num_seqs=1)
    bench.add(("d", 4, 8))
    assert bench.step() == {"a": 1, "b": 1, "c": 1}
    assert bench.waiting == ["d"]


def test_the_largest_need_is_that_of_the_longest_live_request_at_its_end() -> None:
    bench = Bench(16, max_num_seqs=1)
    assert bench.scheduler.largest_need == 0
    bench.add(("a", 4, 4), ("b", 20, 13))
    assert bench.scheduler.largest_need == 9
    bench.scheduler.finish(bench.sequences["b"])
    assert bench.scheduler.largest_need == 2


def test_unused_slots_are_those_of_owned_blocks_without_a_token() -> None:
    bench = Bench(16)
    bench.add(("a", 5, 4))
    bench.schedule()
    assert bench.scheduler.slots_unused == 8
    bench.step()
    assert bench.scheduler.slots_unused == 3


def test_a_prompt_is_counted_once_though_it_is_computed_twice() -> None:
    bench = Bench(4)
    bench.add(("a", 8, 4), ("b", 8, 4))
    prompt_tokens = 0
    while bench.running or bench.waiting:
        step = bench.schedule()
        sampled = {
            chunk.sequence.request_id: 7
            for chunk in step.chunks
            if chunk.start + chunk.count == len(chunk.sequence.tokens)
        }
        prompt_tokens += bench.scheduler.complete(step, sampled).prompt_tokens
        for sequence in list(bench.scheduler.running):
            if sequence.num_output_tokens == 4:
                bench.scheduler.finish(sequence)
    assert bench.sequences["b"].preemptions == 1
    assert prompt_tokens == 16
