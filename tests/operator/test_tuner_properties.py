"""What holds for every sequence of pages, deaths, edits and modes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given
from hypothesis import settings as run
from hypothesis import strategies as st

from plimsoll_operator.spec import TuningMode
from plimsoll_operator.tuning import decide
from plimsoll_operator.tuning.profile import build_profile_status, read_learned
from plimsoll_operator.tuning.record import read_state, record_tuning
from plimsoll_operator.tuning.values import (
    Failure,
    FailureClass,
    Limits,
    Rule,
    TuningDecision,
    TuningInputs,
    Unknown,
    UnknownReason,
)
from support.tuning import INTERVAL, MIB, Fleet, with_lane

FLOOR, CEILING = 1024, 8192
LOWEST, HIGHEST = 0.70, 0.95
# What a new operator observes anew.
UNRECORDED: dict[str, Any] = {
    "windows": {},
    "pressed_since": None,
    "calm_since": None,
    "slack_since": None,
    "unknown_since": None,
    "gathered": None,
}
OOM_RULES = {Rule.OOM, Rule.OOM_AT_START, Rule.KV_TOO_SMALL}


@dataclass(frozen=True)
class Pass:
    """One pass: the page of m-0 (None: unknown), a death, the mode."""

    page: dict[str, Any] | None
    death: FailureClass | None
    mode: TuningMode


pages = st.fixed_dictionaries(
    {
        "kv_cache_usage": st.floats(0, 1),
        "waiting": st.integers(0, 40),
        "running": st.integers(0, 20),
        "preemptions_total": st.integers(0, 5).map(float),
        "allocation_failures_total": st.integers(0, 2).map(float),
        "device_free_low_water_bytes": st.none() | st.integers(0, 500).map(lambda mib: mib * MIB),
        "planned_bytes": st.sampled_from([{}, {"activations": 240 * MIB}]),
    }
)


def passes(*modes: TuningMode) -> st.SearchStrategy[list[Pass]]:
    one = st.builds(
        Pass,
        st.one_of(pages, pages, pages, st.none()),
        st.one_of(st.none(), st.none(), st.none(), st.sampled_from(list(FailureClass))),
        st.sampled_from(modes),
    )
    return st.lists(one, min_size=1, max_size=40)


def bounded(mode: TuningMode = TuningMode.AUTO) -> Any:
    return with_lane(
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        mode=mode,
        start=Limits(CEILING, 0.90),
        min_utilization=LOWEST,
        max_utilization=HIGHEST,
        floor=FLOOR,
        ceiling=CEILING,
    )


def live(script: list[Pass]) -> tuple[Fleet, list[tuple[Pass, TuningInputs, TuningDecision]]]:
    """Runs the passes; counters only ever grow within one life."""
    fleet, lived = Fleet(bounded()), []
    counters = {"preemptions_total": 0.0, "allocation_failures_total": 0.0}
    for number, step in enumerate(script):
        fleet.settings = bounded(step.mode)
        engines: dict[str, Any]
        if step.page is None:
            engines = {"m-0": Unknown(UnknownReason.METRIC_MISSING, "m-0", "gone", "metric")}
        else:
            counters = {name: value + step.page[name] for name, value in counters.items()}
            engines = {"m-0": fleet.page("m-0", **(step.page | counters))}
        failures: tuple[Failure, ...] = ()
        if step.death is not None:
            failures = (Failure(step.death, f"uid/{number}", "m-0", "died", at=fleet.now),)
        inputs = TuningInputs(
            fleet.settings, engines, failures, fleet.state, fleet.learned, fleet.now
        )
        lived.append((step, inputs, fleet.see(engines, failures)))
    return fleet, lived


EVERY = tuple(TuningMode)


@run(deadline=None, max_examples=40)
@given(passes(*EVERY))
def test_limits_never_leave_the_bounds(script: list[Pass]) -> None:
    for step, _, decision in live(script)[1]:
        length, line = decision.limits.max_model_len, decision.limits.gpu_memory_utilization
        assert length is not None
        assert line is not None
        assert FLOOR <= length <= CEILING
        assert LOWEST <= line <= HIGHEST
        share, watermark = decision.limits.long_prompt_share, decision.limits.watermark
        assert share is None or share == 1.0 or 0.50 <= share <= 0.85
        assert watermark is None or watermark == 0.0 or 0.05 <= watermark <= 0.10
        assert (decision.limits.max_num_seqs or 64) in range(1, 65)
        assert (decision.limits.max_num_batched_tokens or 2048) in range(256, 2049)
        if step.mode in (TuningMode.OFF, TuningMode.ADVISE):
            assert (length, line) == (CEILING, 0.90)
            assert share in (None, 1.0)
            assert watermark in (None, 0.0)


@run(deadline=None, max_examples=40)
@given(passes(*EVERY))
def test_the_revision_counts_exactly_the_changes(script: list[Pass]) -> None:
    revision, limits = 0, Limits()
    for _, _, decision in live(script)[1]:
        assert decision.revision == revision + (decision.limits != limits)
        assert bool(decision.changes) <= (decision.limits != limits)
        revision, limits = decision.revision, decision.limits


@run(deadline=None, max_examples=40)
@given(passes(TuningMode.AUTO))
def test_nothing_moves_while_frozen_but_after_a_death(script: list[Pass]) -> None:
    before = Limits()
    for step, _, decision in live(script)[1]:
        if step.page is None and step.death is None and before != Limits():
            assert decision.limits == before
        before = decision.limits


@run(deadline=None, max_examples=40)
@given(passes(TuningMode.AUTO))
def test_one_change_per_settle_window_except_for_deaths(script: list[Pass]) -> None:
    changes = [change for _, _, decision in live(script)[1] for change in decision.changes]
    calm = [change for change in changes if change.rule not in OOM_RULES]
    for change in calm:
        others = [c for c in changes if c is not change and c.time <= change.time]
        assert all(change.time - other.time >= 2 * INTERVAL for other in others)


@run(deadline=None, max_examples=40)
@given(passes(TuningMode.HOLD, TuningMode.AUTO))
def test_hold_holds(script: list[Pass]) -> None:
    before = Limits()
    for step, _, decision in live(script)[1]:
        if step.mode is TuningMode.HOLD and before != Limits():
            assert decision.limits == before
        before = decision.limits


@run(deadline=None, max_examples=40)
@given(passes(TuningMode.INITIAL))
def test_initial_leaves_alone_what_serves(script: list[Pass]) -> None:
    """Every pass has a pod, be it unknown."""
    assert len({decision.limits for _, _, decision in live(script)[1]}) == 1


@run(deadline=None, max_examples=40)
@given(passes(*EVERY))
def test_a_new_operator_goes_on_where_the_last_one_stopped(script: list[Pass]) -> None:
    """What is written loses nothing that decides; and without the last pages nothing moves."""
    for step, inputs, decision in live(script)[1]:
        recorded = read_state(record_tuning(decision))
        learned = read_learned({"status": build_profile_status(decision.learned)})
        assert learned == decision.learned
        observed = {name: getattr(decision.state, name) for name in UNRECORDED}
        later = replace(inputs, state=decision.state, learned=learned, now=inputs.now + INTERVAL)
        checked = replace(later, state=replace(recorded, **observed))
        assert decide(checked).limits == decide(later).limits
        blind = replace(later, state=recorded, failures=())
        if step.page is None:
            assert decide(blind).limits == decision.limits


@run(deadline=None, max_examples=40)
@given(passes(TuningMode.AUTO))
def test_no_raise_soon_after_an_oom(script: list[Pass]) -> None:
    for _, inputs, decision in live(script)[1]:
        for change in decision.changes:
            if change.rule is Rule.AMPLE_HEADROOM:
                last = inputs.learned.last_oom_at
                assert last is None or inputs.now - last >= 6 * 3600


@run(deadline=None, max_examples=40)
@given(passes(*EVERY))
def test_the_same_inputs_give_the_same_decision(script: list[Pass]) -> None:
    for _, inputs, decision in live(script)[1]:
        assert decide(inputs) == decision


@run(deadline=None, max_examples=40)
@given(passes(*EVERY))
def test_what_is_written_reads_back(script: list[Pass]) -> None:
    """All but what is observed anew after a restart."""
    for _, _, decision in live(script)[1]:
        observed = replace(decision.state, **UNRECORDED)
        last = observed.oom.last
        if last is not None:
            kept = Failure(last.failure_class, last.incident, last.pod, last.message, at=last.at)
            observed = replace(observed, oom=replace(observed.oom, last=kept))
        assert read_state(record_tuning(decision)) == observed
