"""Stability: a load that flaps is not followed, and more danger never makes a bolder setting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as run
from hypothesis import strategies as st

from plimsoll_operator.tuning import decide
from plimsoll_operator.tuning.values import (
    Change,
    Learned,
    Limits,
    Parameter,
    TuningDecision,
    TuningInputs,
)
from support.tuning import INTERVAL, MIB, START, Fleet, settings, with_lane

DAY = 86_400.0
HALF_AN_HOUR = 1800.0
BATCH = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
OFF = {"kv_cache_usage": 0.1, "waiting": 0, "running": 1, "short_wait": 2.0, "long_wait": 0.0}


def reversals(changes: Iterable[Change]) -> list[float]:
    """Times at which a limit turned back within half an hour of its last move the other way."""
    turned, last = [], dict[Parameter, Change]()
    for change in changes:
        before = last.get(change.parameter)
        soon = before is not None and change.time - before.time < HALF_AN_HOUR
        if before is not None and soon and _direction(change) != _direction(before):
            turned.append(change.time)
        last[change.parameter] = change
    return turned


def _direction(change: Change) -> bool:
    assert change.before is not None
    assert change.after is not None
    return change.after > change.before


def flap(fleet: Fleet, on: Mapping[str, Any], seconds: float, phases: list[int]) -> None:
    """Alternates the page ``on`` with rest, for the passes that ``phases`` name, over and over."""
    preempted, end, index = 0.0, fleet.now + seconds, 0
    while fleet.now < end:
        busy = index % 2 == 0
        for _ in range(phases[index % len(phases)]):
            preempted += 3.0 if busy and on.get("preempting") else 0.0
            page = {key: value for key, value in on.items() if key != "preempting"}
            fleet.look(**(page if busy else OFF), preemptions_total=preempted)
        index += 1


FULL = {"kv_cache_usage": 0.97, "waiting": 9, "running": 9}
LOADS = {
    "a queue, no lane": (settings(), FULL),
    "a queue": (with_lane(**BATCH), FULL),
    "preemptions": (with_lane(**BATCH), FULL | {"preempting": True}),
    "both kinds waiting in turn": (
        with_lane(**BATCH),
        FULL | {"short_wait": 0.0, "long_wait": 29.0, "kv_cache_usage": 0.7},
    ),
    "little free memory": (
        with_lane(**BATCH, max_utilization=0.96),
        FULL | {"device_free_low_water_bytes": 30 * MIB},
    ),
}


@pytest.mark.parametrize("load", LOADS)
def test_b9_a_minute_on_and_a_minute_off_turns_no_limit_more_than_twice(load: str) -> None:
    """Six hours of a day that goes on like this: what was learned of the load lasts 24 hours."""
    found, page = LOADS[load]
    fleet = Fleet(replace(found, scrape_interval=20.0), interval=20.0)
    flap(fleet, page, DAY / 4, [3, 3])
    changes = [change for decision in fleet.log for change in decision.changes]
    by_parameter = {
        parameter: reversals(c for c in changes if c.parameter is parameter)
        for parameter in Parameter
    }
    assert all(len(turns) <= 2 for turns in by_parameter.values()), by_parameter
    assert sum(map(len, by_parameter.values())) <= 4
    # Whatever turned did so at the beginning: the rest of the day is quiet.
    assert all(time < START + 3600 for turns in by_parameter.values() for time in turns)


@run(deadline=None, max_examples=12)
@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=2)
    | st.lists(st.integers(1, 10), min_size=4, max_size=8),
    st.sampled_from(sorted(LOADS)),
)
def test_no_rhythm_turns_a_limit_more_than_twice(phases: list[int], load: str) -> None:
    """Loads that repeat themselves within half an hour, for six hours: the way back from the second
    turn waits for more rest than they ever have. What comes once an hour may be followed."""
    found, page = LOADS[load]
    fleet = Fleet(replace(found, scrape_interval=20.0), interval=20.0)
    flap(fleet, page, DAY / 4, phases)
    for parameter in Parameter:
        turns = reversals(
            change for d in fleet.log for change in d.changes if change.parameter is parameter
        )
        assert len(turns) <= 2, (parameter, turns)


pages = st.fixed_dictionaries(
    {
        "kv_cache_usage": st.floats(0, 1),
        "waiting": st.integers(0, 40),
        "running": st.integers(1, 20),
        "preemptions_total": st.integers(0, 3).map(float),
        "allocation_failures_total": st.integers(0, 2).map(float),
        "device_free_low_water_bytes": st.integers(0, 500).map(lambda mib: mib * MIB),
        "planned_bytes": st.sampled_from([{}, {"activations": 240 * MIB}]),
    }
)


def judged(history: Sequence[Mapping[str, Any]], last: Mapping[str, Any]) -> TuningDecision:
    """The decision on a page after the same past; counters of the last page add to it."""
    fleet = Fleet(with_lane(**BATCH, max_utilization=0.96))
    totals = {"preemptions_total": 0.0, "allocation_failures_total": 0.0}
    for page in [*history, last]:
        totals = {name: value + page[name] for name, value in totals.items()}
        decision = fleet.look(**(dict(page) | totals))
    return decision


def value(decision: TuningDecision, parameter: Parameter) -> float:
    found = decision.limits.value(parameter)
    whole = {Parameter.MAX_NUM_SEQS: 64.0, Parameter.MAX_NUM_BATCHED_TOKENS: 2048.0}
    return whole.get(parameter, 0.0) if found is None else found


@run(deadline=None, max_examples=100)
@given(st.lists(pages, min_size=3, max_size=12), pages, st.integers(0, 300), st.integers(0, 2))
def test_less_free_memory_never_makes_a_bolder_line_or_batch(
    past: list[dict[str, Any]], page: dict[str, Any], less: int, failures: int
) -> None:
    free = max(0, page["device_free_low_water_bytes"] - less * MIB)
    count = page["allocation_failures_total"] + failures
    worse = page | {"device_free_low_water_bytes": free, "allocation_failures_total": count}
    calm, danger = judged(past, page), judged(past, worse)
    for parameter in (Parameter.GPU_MEMORY_UTILIZATION, Parameter.MAX_NUM_BATCHED_TOKENS):
        # One change at a time: where the one has gone down, the other may wait for its turn.
        other = {
            Parameter.GPU_MEMORY_UTILIZATION: Parameter.MAX_NUM_BATCHED_TOKENS,
            Parameter.MAX_NUM_BATCHED_TOKENS: Parameter.GPU_MEMORY_UTILIZATION,
        }[parameter]
        answered = value(danger, other) < value(calm, other)
        assert value(danger, parameter) <= value(calm, parameter) or answered


@run(deadline=None, max_examples=100)
@given(st.lists(pages, min_size=3, max_size=12), pages, st.floats(0, 1), st.integers(0, 30))
def test_a_fuller_cache_or_a_longer_queue_never_admits_more(
    past: list[dict[str, Any]], page: dict[str, Any], fuller: float, more: int
) -> None:
    usage = page["kv_cache_usage"] + fuller * (1 - page["kv_cache_usage"])
    worse = page | {"kv_cache_usage": usage, "waiting": page["waiting"] + more}
    calm, pressed = judged(past, page), judged(past, worse)
    for parameter in (Parameter.MAX_MODEL_LEN, Parameter.LONG_PROMPT_SHARE):
        assert value(pressed, parameter) <= value(calm, parameter)


@run(deadline=None, max_examples=60)
@given(st.lists(pages, min_size=3, max_size=12), pages)
def test_preemptions_never_let_more_run(past: list[dict[str, Any]], page: dict[str, Any]) -> None:
    calm = judged(past, page | {"preemptions_total": 0.0})
    preempted = judged(past, page | {"preemptions_total": 3.0})
    assert value(preempted, Parameter.WATERMARK) >= value(calm, Parameter.WATERMARK)
    assert value(preempted, Parameter.MAX_NUM_SEQS) <= value(calm, Parameter.MAX_NUM_SEQS)


@run(deadline=None, max_examples=40)
@given(pages, st.floats(60, 6 * 3600 - 60))
def test_nothing_is_raised_within_six_hours_of_an_oom(page: dict[str, Any], since: float) -> None:
    found = with_lane(**BATCH, max_utilization=0.96)
    ample = page | {"device_free_low_water_bytes": 500 * MIB, "allocation_failures_total": 0.0}
    fleet = Fleet(found, Learned(last_oom_at=START - since))
    state = replace(
        fleet.state, tuned=Limits(gpu_memory_utilization=0.80, max_num_batched_tokens=512)
    )
    fleet.state = replace(state, mode=found.mode, basis=found.start)
    for _ in range(8):
        decision = fleet.look(**ample)
    assert decision.limits.gpu_memory_utilization == 0.80
    assert decision.limits.max_num_batched_tokens == 512


def test_the_same_inputs_decide_the_same_whoever_asks() -> None:
    fleet = Fleet(with_lane(**BATCH))
    fleet.idle(60, **FULL)
    inputs = TuningInputs(
        fleet.settings,
        {"m-0": fleet.page("m-0", **FULL)},
        (),
        fleet.state,
        fleet.learned,
        fleet.now + INTERVAL,
    )
    assert decide(inputs) == decide(replace(inputs, learned=replace(fleet.learned)))
