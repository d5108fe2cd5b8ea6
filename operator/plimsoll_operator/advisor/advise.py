"""One pass of judgement: what the tuner would do with these engines.

In: an :class:`Observed` and what was known before. Out: :class:`Advised`. Pure: the tuner decides, in
mode Advise, and here its answer is put beside what came before.
"""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll_operator.advisor.advice import Advice, follow
from plimsoll_operator.advisor.observed import Observed
from plimsoll_operator.advisor.settings import NOTHING, Current, find_current, tuning_settings
from plimsoll_operator.advisor.traffic import Traffic, add_pages
from plimsoll_operator.tuning import decide
from plimsoll_operator.tuning.failures import classify
from plimsoll_operator.tuning.values import (
    EngineReading,
    Failure,
    Learned,
    LimitsOutcome,
    OutcomeKind,
    Parameter,
    TuningDecision,
    TuningInputs,
    TuningState,
)


@dataclass(frozen=True)
class Known:
    """What goes from pass to pass; status has it all (record.py)."""

    state: TuningState
    learned: Learned
    traffic: Traffic
    advice: tuple[Advice, ...]


@dataclass(frozen=True)
class Advised:
    """``decision`` None: the tuner was not asked, because there was nothing to ask it about.
    ``fresh`` is advice that was not there before."""

    known: Known
    current: Current
    failures: tuple[Failure, ...]
    decision: TuningDecision | None
    fresh: tuple[Advice, ...] = ()


def advise(observed: Observed, known: Known, now: float) -> Advised:
    failures = tuple(
        failure
        for each in observed.pods
        if not each.no_container and (failure := classify(each.pod)) is not None
    )
    newest = observed.newest
    if newest is None:
        return Advised(known, NOTHING, failures, None)
    current = find_current(newest.flags, _page_of(newest.name, observed))
    container = newest.pod.container
    settings = tuning_settings(
        observed.advisor,
        current,
        observed.readings,
        uses_device=newest.uses_device,
        memory_limit=None if container is None else container.memory_limit,
    )
    if settings is None:
        return Advised(known, current, failures, None)
    decision = decide(
        TuningInputs(
            settings=settings,
            engines=observed.engines,
            failures=failures,
            state=known.state,
            learned=known.learned,
            now=now,
            outcomes=_in_force(observed, known.state),
        )
    )
    changes = [
        change
        for change in decision.advice
        # With a cache of so many bytes the share of memory decides nothing.
        if change.parameter is not Parameter.GPU_MEMORY_UTILIZATION
        or current.kv_cache_memory_bytes is None
    ]
    advice = follow(known.advice, changes, current, now)
    before = {(each.parameter, each.rule, each.since) for each in known.advice}
    return Advised(
        known=Known(
            state=decision.state,
            learned=decision.learned,
            traffic=add_pages(known.traffic, known.state.windows, decision.state.windows),
            advice=advice,
        ),
        current=current,
        failures=failures,
        decision=decision,
        fresh=tuple(
            each for each in advice if (each.parameter, each.rule, each.since) not in before
        ),
    )


def _page_of(pod: str, observed: Observed) -> EngineReading | None:
    """The pod's own page, or while it has none another's: all are made from one template."""
    own = observed.pages.get(pod)
    if isinstance(own, EngineReading):
        return own
    return next(iter(observed.readings), None)


def _in_force(observed: Observed, state: TuningState) -> dict[str, LimitsOutcome]:
    """Nothing is sent to these engines: what they run with is in force by itself."""
    return {
        reading.pod: LimitsOutcome(OutcomeKind.APPLIED, reading.pod, state.revision)
        for reading in observed.readings
    }
