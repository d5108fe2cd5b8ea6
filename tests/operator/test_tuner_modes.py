"""Modes, edits of the spec, and where a deployment starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plimsoll_operator.spec import TuningMode
from plimsoll_operator.tuning.values import (
    LANE,
    Blocked,
    FailureClass,
    Learned,
    Limits,
    Parameter,
    Rule,
    Source,
)
from support.tuning import (
    CALM,
    FULL,
    MIB,
    START,
    TOTAL,
    Fleet,
    died,
    events,
    holds,
    settings,
    verdict,
    with_lane,
)


class TestModes:
    def test_off_is_the_spec_and_goes_back_to_it(self) -> None:
        fleet = Fleet()
        fleet.idle(20, **FULL)
        assert fleet.state.limits.max_model_len == 2048
        fleet.settings = settings(mode=TuningMode.OFF)
        decision = fleet.look(**FULL)
        assert decision.limits == Limits(8192, 0.90)
        assert decision.changes[0].rule is Rule.MODE
        assert verdict(decision, "TuningActive").reason == "Off"
        fleet.idle(60, **FULL)
        assert fleet.state.limits == Limits(8192, 0.90)

    def test_off_keeps_even_a_value_that_killed(self) -> None:
        fleet = Fleet(settings(mode=TuningMode.OFF, start=Limits(8192, 0.98)))
        decision = fleet.see({}, [died(FailureClass.CUDA_OOM_AT_RUNTIME, START, serving=True)])
        assert decision.limits.gpu_memory_utilization == 0.98
        assert decision.learned.blocked[0].utilization == 0.98
        assert holds(decision, "OOMDetected")

    def test_advise_says_what_it_would_do_and_does_nothing(self) -> None:
        fleet = Fleet(settings(mode=TuningMode.ADVISE))
        decision = fleet.idle(30, **FULL)
        assert decision.limits == Limits(8192, 0.90)
        assert decision.target.max_model_len == 4096
        (advice,) = decision.advice
        assert (advice.parameter, advice.before, advice.after) == (
            Parameter.MAX_MODEL_LEN,
            8192,
            4096,
        )
        assert advice.rule is Rule.PRESSURE
        assert decision.changes == ()
        assert events(fleet) == []
        assert verdict(decision, "TuningActive").reason == "Advise"

    def test_what_auto_starts_with_is_advice_as_well(self) -> None:
        fleet = Fleet(with_lane(mode=TuningMode.ADVISE))
        fleet.idle(10, **CALM)
        death = died(FailureClass.CUDA_OOM_AT_RUNTIME, fleet.now, serving=True)
        assert Rule.OOM in {each.rule for each in fleet.see({}, [death]).advice}
        # The death is over, and what it taught is not.
        rules = {each.parameter: each.rule for each in fleet.look(**CALM).advice}
        assert rules == {
            Parameter.GPU_MEMORY_UTILIZATION: Rule.LEARNED,
            **dict.fromkeys(LANE, Rule.LANE),
        }
        assert fleet.log[-1].limits == Limits(8192, 0.90)

    def test_initial_moves_nothing_while_engines_serve(self) -> None:
        fleet = Fleet(with_lane(mode=TuningMode.INITIAL, max_utilization=0.96))
        fleet.see({})
        started = fleet.state.limits
        assert started.long_prompt_share == 0.70
        fleet.idle(300, **FULL, device_free_low_water_bytes=10 * MIB)
        decision = fleet.idle(300, **CALM, device_free_low_water_bytes=300 * MIB)
        assert decision.limits == started
        assert events(fleet) == []
        assert verdict(decision, "TuningActive").reason == "Initial"

    def test_initial_starts_the_next_pods_from_what_was_learned(self) -> None:
        fleet = Fleet(settings(mode=TuningMode.INITIAL))
        fleet.idle(10)
        death = died(FailureClass.CUDA_OOM_AT_RUNTIME, fleet.now, serving=True)
        other = fleet.page("m-1")
        assert fleet.see({"m-1": other}, [death]).limits.gpu_memory_utilization == 0.90
        decision = fleet.see({}, [death])
        assert decision.limits.gpu_memory_utilization == 0.82
        assert decision.changes[0].rule is Rule.LEARNED
        assert decision.source is Source.LEARNED

    def test_hold_keeps_the_values_in_force(self) -> None:
        fleet = Fleet()
        fleet.idle(20, **FULL)
        fleet.settings = settings(mode=TuningMode.HOLD)
        fleet.idle(300, **CALM)
        decision = fleet.see({}, [died(FailureClass.CUDA_OOM_AT_RUNTIME, fleet.now, serving=True)])
        assert decision.limits == Limits(2048, 0.90)
        assert decision.source is Source.PINNED

    def test_b04_a_smaller_spec_is_the_new_ceiling_at_once(self) -> None:
        fleet = Fleet()
        fleet.idle(10)
        fleet.look(**FULL)
        assert fleet.state.limits.max_model_len == 4096
        # The same spec again does not undo the tuning.
        assert fleet.look(**CALM).limits.max_model_len == 4096
        fleet.settings = settings(start=Limits(6144, 0.90), ceiling=6144, generation=2)
        decision = fleet.look(**CALM)
        assert decision.limits.max_model_len == 4096
        assert decision.upper_bound.max_model_len == 6144
        fleet.idle(120, **CALM)
        assert fleet.state.limits.max_model_len == 6144

    def test_b04_an_untuned_length_follows_the_spec(self) -> None:
        fleet = Fleet()
        fleet.look()
        fleet.settings = settings(start=Limits(6144, 0.90), ceiling=6144, generation=2)
        decision = fleet.look()
        assert decision.limits.max_model_len == 6144
        assert decision.changes[0].rule is Rule.SPEC
        assert decision.events == ()

    @pytest.mark.parametrize("length", [4096, 1500])
    def test_a_lowered_start_is_in_force_before_any_rule_moves_it(self, length: int) -> None:
        """However long it had been calm, and although the bounds allow more."""
        fleet = Fleet()
        fleet.idle(600, **CALM)
        fleet.settings = settings(start=Limits(length, 0.90), generation=2)
        decision = fleet.look(**CALM)
        assert decision.limits.max_model_len == length
        assert [change.rule for change in decision.changes] == [Rule.SPEC]
        assert decision.events == ()
        for _ in range(3):
            assert fleet.look(**CALM).limits.max_model_len == length
        fleet.idle(120, **CALM)
        rules = [change.rule for change in fleet.state.history]
        assert fleet.lengths[-1] == 8192
        assert set(rules[1:]) == {Rule.CALM}

    def test_a_raised_ceiling_waits_for_the_last_engine_of_the_old_one(self) -> None:
        fleet = Fleet()
        fleet.look()
        fleet.settings = settings(start=Limits(16384, 0.90), ceiling=16384, generation=2)
        assert fleet.look().limits.max_model_len == 8192
        fleet.now += 200
        assert fleet.look(max_model_len_ceiling=16384).limits.max_model_len == 16384

    def test_a_changed_utilisation_in_the_spec_is_the_new_start(self) -> None:
        fleet = Fleet()
        fleet.idle(10, device_free_low_water_bytes=30 * MIB)
        fleet.settings = settings(start=Limits(8192, 0.80), max_utilization=0.80)
        assert fleet.look().limits.gpu_memory_utilization == 0.80


class TestProfile:
    def learned(self, **changes: Any) -> Learned:
        blocked = Blocked(0.90, 0.81, START - 60, FailureClass.CUDA_OOM_AT_RUNTIME)
        return replace(Learned(blocked=(blocked,), last_oom_at=START - 60), **changes)

    def test_a_new_deployment_starts_where_another_one_was_safe(self) -> None:
        fleet = Fleet(learned=self.learned())
        decision = fleet.look(gpu_memory_utilization=0.81)
        assert decision.limits.gpu_memory_utilization == 0.81
        assert decision.source is Source.LEARNED
        assert decision.changes[0].rule is Rule.LEARNED

    def test_the_last_known_good_is_better_than_the_retreat(self) -> None:
        fleet = Fleet(learned=self.learned(last_known_good=0.86))
        assert fleet.look().limits.gpu_memory_utilization == 0.86

    def test_a_block_that_has_passed_changes_nothing_by_itself(self) -> None:
        """Neither for a new deployment nor, without need, for one that went down for it."""
        old = Blocked(0.90, 0.81, START - 25 * 3600, FailureClass.CUDA_OOM_AT_RUNTIME)
        assert Fleet(learned=Learned((old,))).look().limits.gpu_memory_utilization == 0.90
        fleet = Fleet(learned=self.learned())
        fleet.look()
        fleet.now = START + 25 * 3600
        assert fleet.idle(600).limits.gpu_memory_utilization == 0.81

    def test_a_full_cache_with_its_headroom_is_good(self) -> None:
        fleet = Fleet()
        fleet.idle(10, kv_cache_usage=0.95)
        assert fleet.learned.last_known_good == 0.90

    def test_use_above_the_line_is_remembered(self) -> None:
        fleet = Fleet()
        low = int(0.055 * TOTAL)
        fleet.look(device_free_low_water_bytes=low)
        assert fleet.learned.overrun == 0.05
        again = Fleet(settings(start=Limits(8192, 0.97), max_utilization=0.97))
        again.learned = fleet.learned
        assert again.see({}).limits.gpu_memory_utilization == 0.92
