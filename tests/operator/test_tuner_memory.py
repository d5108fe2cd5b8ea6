"""The memory line: given back when free memory runs low, raised when it is ample."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll_operator.tuning.values import (
    Limits,
    Parameter,
    Rule,
)
from support.tuning import (
    CALM,
    FULL,
    MIB,
    PLAN,
    TOTAL,
    Fleet,
    events,
    settings,
    verdict,
)


class TestHeadroom:
    def test_little_free_memory_lowers_the_line(self) -> None:
        """1200 MiB want 60 MiB of headroom; 30 are left."""
        fleet = Fleet()
        decision = fleet.look(device_free_low_water_bytes=30 * MIB)
        decision = fleet.idle(10, device_free_low_water_bytes=30 * MIB)
        assert decision.limits.gpu_memory_utilization == pytest.approx(0.87)
        assert fleet.state.history[-1].rule is Rule.LOW_HEADROOM
        assert "30 MiB free at the lowest, 60 MiB wanted" in fleet.state.history[-1].reason

    def test_the_next_step_waits_until_the_low_water_mark_is_new(self) -> None:
        fleet = Fleet()
        fleet.idle(60, device_free_low_water_bytes=30 * MIB)
        assert fleet.utilizations == [0.90, 0.87]
        fleet.idle(30, device_free_low_water_bytes=30 * MIB)
        assert len(fleet.utilizations) == 3

    def test_the_minimum_holds(self) -> None:
        fleet = Fleet(settings(min_utilization=0.85))
        decision = fleet.idle(600, device_free_low_water_bytes=MIB)
        assert decision.limits.gpu_memory_utilization == 0.85
        assert "minimum of 0.85" in verdict(decision, "TuningLimited").message

    def test_a_caught_allocation_failure_lowers_it_without_waiting(self) -> None:
        fleet = Fleet()
        fleet.idle(15)
        decision = fleet.look(allocation_failures_total=2.0)
        assert decision.limits.gpu_memory_utilization == 0.88
        assert decision.changes[0].rule is Rule.ALLOCATION_FAILURE

    def test_a_failure_gives_back_no_less_than_the_missing_headroom_would(self) -> None:
        lines = []
        for failures in (0.0, 1.0):
            fleet = Fleet()
            fleet.idle(15)
            low = {"device_free_low_water_bytes": 10 * MIB}
            decision = fleet.look(**low, allocation_failures_total=failures)
            lines.append(decision.limits.gpu_memory_utilization)
        assert lines == [0.85, 0.85]

    def test_free_memory_is_used_under_lasting_pressure_rarely(self) -> None:
        fleet = Fleet(settings(max_utilization=0.96, tunes_length=False, floor=None))
        ample = {"device_free_low_water_bytes": 300 * MIB}
        fleet.idle(240, **FULL, **ample)
        assert fleet.utilizations == [0.90, 0.92]
        fleet.idle(1200, **FULL, **ample)
        assert fleet.utilizations == [0.90, 0.92, 0.94, 0.96]
        assert set(events(fleet)) == {"PoolRaised"}

    @pytest.mark.parametrize(
        ("why", "page"),
        [
            ("calm", {**CALM, "device_free_low_water_bytes": 300 * MIB}),
            ("no memory to spare", {**FULL, "device_free_low_water_bytes": 130 * MIB}),
            ("free memory unknown", {**FULL, "device_free_low_water_bytes": None}),
        ],
    )
    def test_when_it_is_not_raised(self, why: str, page: dict[str, Any]) -> None:
        fleet = Fleet(settings(max_utilization=0.96, tunes_length=False, floor=None))
        fleet.idle(900, **page)
        assert fleet.utilizations == [0.90], why

    def test_the_admitted_length_bounds_the_line(self) -> None:
        """512 blocks hold just the 8192 tokens; each hundredth of the device is 10.24 blocks."""
        fleet = Fleet(settings(tunes_length=False, floor=None))
        low = {"device_free_low_water_bytes": 10 * MIB}
        decision = fleet.idle(60, usable_blocks=512, **PLAN, **low)
        assert fleet.utilizations == [0.90]
        assert "would not hold one request of 8192" in verdict(decision, "TuningLimited").message

    def test_a_length_that_may_move_goes_first(self) -> None:
        fleet = Fleet()
        for _ in range(12):
            # 1024 blocks would fill the device; 512 of them, at 0.90, hold just 8192 tokens.
            line = fleet.state.limits.gpu_memory_utilization or 0.90
            blocks = 512 - round((0.90 - line) * 1024)
            planned = {"kv_cache": blocks * TOTAL // 1024}
            low = 10 * MIB + int((0.90 - line) * TOTAL)
            fleet.look(usable_blocks=blocks, planned_bytes=planned, device_free_low_water_bytes=low)
        first, second = fleet.state.history
        assert (first.parameter, first.rule) == (Parameter.MAX_MODEL_LEN, Rule.LOW_HEADROOM)
        assert second.parameter is Parameter.GPU_MEMORY_UTILIZATION
        assert fleet.state.limits == Limits((512 - 52 - 1) * 16, 0.85)
