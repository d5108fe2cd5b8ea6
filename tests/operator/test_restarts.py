"""Limits that cost a restart: only in a valley, within the budget, and when it repays itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plimsoll_operator.tuning.histogram import EMPTY
from plimsoll_operator.tuning.restarts import restarts_of_the_day
from plimsoll_operator.tuning.values import (
    Change,
    Failure,
    FailureClass,
    Learned,
    Parameter,
    Peaks,
    Rule,
)
from support.tuning import FULL, MIB, START, Fleet, settings, verdict

LINE = Parameter.GPU_MEMORY_UTILIZATION
QUIET = {"kv_cache_usage": 0.10, "waiting": 0, "running": 1}
LOW = {"device_free_low_water_bytes": 20 * MIB}
AMPLE = {"device_free_low_water_bytes": 300 * MIB}
# 800 blocks would fill the device.
SMALL = {"usable_blocks": 400, "block_size": 16, "planned_bytes": {"kv_cache": 600 * MIB}}


def fleet(short: float | None = None, **changes: Any) -> Fleet:
    """``short``: part of the windows of a day in which more was wanted than there was."""
    peaks = Peaks()
    if short is not None:
        demand = EMPTY.added([(0.3, 288 * (1 - short)), (1.5, 288 * short)], START)
        peaks = Peaks(demand=demand)
    changed = {"live": frozenset(Parameter) - {LINE}, "max_utilization": 0.96} | changes
    return Fleet(settings(**changed), Learned(peaks=peaks))


def test_low_headroom_waits_for_a_valley() -> None:
    found = fleet()
    decision = found.idle(1200, **FULL, **LOW)
    assert found.utilizations == [0.90]
    assert "waits for a valley" in verdict(decision, "TuningLimited").message
    found.idle(500, **QUIET, **LOW)
    assert found.utilizations == [0.90]
    found.idle(200, **QUIET, **LOW)
    assert len(found.utilizations) == 2
    found.idle(1600, **QUIET, **LOW)
    assert len(found.utilizations) == 2
    found.idle(300, **QUIET, **LOW)
    assert len(found.utilizations) == 3


def test_the_budget_of_the_day_holds() -> None:
    found = fleet(max_restarts_per_day=2)
    decision = found.idle(3 * 3600, **QUIET, **LOW)
    assert len(found.utilizations) == 3
    assert "maxRestartsPerDay of 2 is used up" in verdict(decision, "TuningLimited").message
    live = frozenset(Parameter) - {LINE}
    assert restarts_of_the_day(decision.state.history, live, found.now) == 2
    found.now += 86_400
    assert restarts_of_the_day(decision.state.history, live, found.now) == 0
    found.idle(700, **QUIET, **LOW)
    assert len(found.utilizations) == 4


def test_none_is_allowed() -> None:
    found = fleet(max_restarts_per_day=0)
    found.idle(3600, **QUIET, **LOW)
    assert found.utilizations == [0.90]


def test_a_raise_must_repay_itself() -> None:
    """A step of 0.02 adds 15 blocks to these 400. Where more was wanted in a tenth of the day that
    is 324 s of service, against 60 s of drain and 120 s of start; in a fiftieth, 65 s."""
    seldom = fleet(0.02)
    decision = seldom.idle(1200, **QUIET, **AMPLE, **SMALL)
    assert seldom.utilizations == [0.90]
    message = verdict(decision, "TuningLimited").message
    assert "a restart would gain" in message
    assert "cost 180 s" in message
    often = fleet(0.1)
    often.idle(620, **QUIET, **AMPLE, **SMALL)
    assert often.utilizations == [0.90, 0.92]


def test_nothing_is_raised_in_a_burst() -> None:
    found = fleet(0.5)
    found.idle(1200, **FULL, **AMPLE)
    assert found.utilizations == [0.90]


def test_a_death_needs_no_valley() -> None:
    """The engine starts anew in any case."""
    found = fleet(max_restarts_per_day=0)
    found.idle(30, **FULL)
    death = Failure(FailureClass.CUDA_OOM_AT_RUNTIME, "u/1", "m-0", "died", found.now, serving=True)
    assert found.see({}, [death]).limits.gpu_memory_utilization == 0.82


def test_limits_that_move_live_cost_nothing() -> None:
    found = fleet(max_restarts_per_day=2)
    change = Change(START, Parameter.MAX_MODEL_LEN, 8192, 4096, Rule.PRESSURE, "", "", 1)
    found.state = replace(found.state, history=(change,) * 9)
    found.idle(3600, **QUIET, **LOW)
    assert len(found.utilizations) == 3
