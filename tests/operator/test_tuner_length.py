"""The admitted length, where no lane takes the pressure first."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from plimsoll_operator.tuning.values import (
    Limits,
    Rule,
    Source,
)
from support.tuning import (
    CALM,
    FULL,
    INTERVAL,
    MILD,
    PLAN,
    START,
    Fleet,
    events,
    holds,
    settings,
    verdict,
)


class TestLength:
    def test_an_idle_deployment_is_left_alone(self) -> None:
        fleet = Fleet()
        decision = fleet.idle(600)
        assert fleet.lengths == [8192]
        assert fleet.utilizations == [0.90]
        assert events(fleet) == []
        assert decision.revision == 1
        assert decision.source is Source.SPEC
        assert holds(decision, "TuningActive")
        assert not holds(decision, "TuningLimited")

    def test_severe_pressure_lowers_the_length_at_once(self) -> None:
        fleet = Fleet()
        fleet.look()
        fleet.idle(INTERVAL)
        decision = fleet.look(**FULL)
        assert decision.limits.max_model_len == 4096
        assert decision.revision == 2
        (change,) = decision.changes
        assert change.rule is Rule.PRESSURE
        assert (change.before, change.after) == (8192, 4096)
        assert change.reason == "m-0: cache 97% full, 12 waiting"
        assert change.inputs["kvCacheUsage"] == 0.97
        assert [event.reason for event in decision.events] == ["LengthLowered"]

    def test_mild_pressure_must_be_on_two_pages(self) -> None:
        fleet = Fleet()
        fleet.idle(10)
        assert fleet.look(**MILD).limits.max_model_len == 8192
        assert fleet.look(**MILD).limits.max_model_len == 4096

    def test_it_goes_down_to_the_floor_and_says_that_it_is_there(self) -> None:
        fleet = Fleet()
        decision = fleet.idle(60, **FULL)
        assert fleet.lengths == [8192, 4096, 2048, 1024]
        assert verdict(decision, "TuningLimited").message == "maxModelLen is at its floor of 1024"
        assert decision.uncapped.max_model_len == 512
        # One change per settle window: two intervals lie between any two.
        times = [change.time for change in fleet.state.history]
        assert min(b - a for a, b in pairwise(times)) >= 2 * INTERVAL

    def test_calm_restores_it_within_a_minute(self) -> None:
        fleet = Fleet()
        fleet.idle(60, **FULL)
        began = fleet.now
        while fleet.state.limits.max_model_len != 8192:
            fleet.look(**CALM)
            assert fleet.now - began <= 60
        assert fleet.lengths[-4:] == [1024, 2048, 4096, 8192]
        assert fleet.log[-1].source is Source.SPEC
        assert events(fleet).count("LengthRestored") == 3

    @pytest.mark.parametrize(
        ("why", "page"),
        [
            ("a full cache without a queue is what a paged engine is for", {"kv_cache_usage": 1.0}),
            (
                "the queue of a half-empty cache is compute's",
                {"kv_cache_usage": 0.4, "waiting": 50},
            ),
            (
                "few waiting beside many running fit",
                {"kv_cache_usage": 0.6, "waiting": 1, "running": 9},
            ),
        ],
    )
    def test_what_is_no_pressure(self, why: str, page: dict[str, Any]) -> None:
        fleet = Fleet()
        fleet.idle(120, **page)
        assert fleet.lengths == [8192], why

    @pytest.mark.parametrize(
        ("why", "page"),
        [
            ("predicted demand", {"kv_cache_usage": 0.6, "waiting": 4, "running": 4}),
            (
                "queue time above the goal",
                {"kv_cache_usage": 0.6, "waiting": 1, "running": 9, "queued": 3.0},
            ),
            ("preemptions", {"kv_cache_usage": 0.85, "preempted": 2.0}),
        ],
    )
    def test_what_is_pressure(self, why: str, page: dict[str, Any]) -> None:
        fleet = Fleet()
        fleet.idle(10)
        queued, preempted = page.pop("queued", 0.0), page.pop("preempted", 0.0)
        for index in range(3):
            fleet.look(
                **page,
                queue_seconds_total=queued * index,
                queued_requests_total=float(index),
                preemptions_total=preempted * index,
            )
        assert fleet.lengths == [8192, 4096], why

    def test_without_tuning_max_model_len_it_is_never_touched(self) -> None:
        fleet = Fleet(settings(tunes_length=False, floor=None))
        decision = fleet.idle(120, **FULL)
        assert fleet.lengths == [8192]
        assert decision.lower_bound.max_model_len is None

    def test_a_length_that_the_engine_finds_itself(self) -> None:
        """spec.engine.maxModelLen omitted: the engines' ceiling is the top."""
        fleet = Fleet(settings(start=Limits(None, 0.90), ceiling=None))
        assert fleet.idle(10).limits.max_model_len is None
        fleet.look(**FULL)
        assert fleet.state.limits.max_model_len == 4096
        fleet.idle(90, **CALM)
        assert fleet.state.limits.max_model_len == 8192

    def test_without_a_floor_a_quarter_of_the_ceiling_is_left(self) -> None:
        fleet = Fleet(settings(floor=None))
        fleet.idle(120, **FULL)
        assert fleet.state.limits.max_model_len == 2048

    def test_a_length_that_starts_below_its_ceiling_rises_in_calm(self) -> None:
        fleet = Fleet(settings(start=Limits(4096, 0.90), ceiling=8192))
        fleet.idle(60, **CALM)
        assert fleet.lengths == [4096, 8192]

    def test_the_pool_bounds_what_is_admitted_again(self) -> None:
        """300 blocks hold 4800 tokens: more would be refused by the engine."""
        fleet = Fleet()
        fleet.idle(30, usable_blocks=300, **PLAN, **FULL)
        decision = fleet.idle(120, usable_blocks=300, **PLAN, **CALM)
        assert decision.limits.max_model_len == 4800
        assert holds(decision, "TuningLimited")

    def test_flapping_load_is_followed_once_and_then_waited_out(self) -> None:
        fleet = Fleet()
        for _ in range(20):
            fleet.idle(60, **FULL)
            fleet.idle(60, **CALM)
        lowered = [c.time for d in fleet.log for c in d.changes if c.rule is Rule.PRESSURE]
        raised = [c.time for d in fleet.log for c in d.changes if c.rule is Rule.CALM]
        # Three steps up in the first minute of calm; the second would have to last half an hour.
        assert len(raised) == 3
        assert max(raised) < START + 130
        assert len(lowered) == 6
        fleet.idle(1700, **CALM)
        assert fleet.state.limits.max_model_len == 1024
        fleet.idle(180, **CALM)
        assert fleet.state.limits.max_model_len == 8192
