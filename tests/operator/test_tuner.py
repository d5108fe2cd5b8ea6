"""The tuner's decisions as scenarios: what the pages say, pass by pass, and what follows.

The fleet of support.tuning is one pod on CPU with 1200 MiB, a length between 1024 and 8192 tokens
and a pass every 5 s.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from plimsoll_operator.spec import TuningMode
from plimsoll_operator.tuning.values import (
    Blocked,
    Failure,
    FailureClass,
    Learned,
    Limits,
    LimitsOutcome,
    OutcomeKind,
    Parameter,
    Rule,
    Source,
    Status,
    Unknown,
    UnknownReason,
)
from support.tuning import INTERVAL, MIB, START, TOTAL, Fleet, holds, settings, verdict

FULL = {"kv_cache_usage": 0.97, "waiting": 12, "running": 6}
MILD = {"kv_cache_usage": 0.92, "waiting": 3, "running": 6}
CALM = {"kv_cache_usage": 0.20, "waiting": 0, "running": 1}
# A cache that takes what the line leaves: 100 blocks of 16 tokens per hundredth of utilisation.
PLAN = {"planned_bytes": {"kv_cache": 600 * MIB}, "block_size": 16}


def events(fleet: Fleet) -> list[str]:
    return [event.reason for decision in fleet.log for event in decision.events]


def died(
    failure_class: FailureClass, at: float, *, pod: str = "m-0", number: int = 1, **changes: Any
) -> Failure:
    default = Failure(failure_class, f"uid-{pod}/{number}", pod, "it died", at=at)
    return replace(default, **changes)


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
        # Three steps up in the first minute of calm; the second would have to last five minutes.
        assert len(raised) == 3
        assert max(raised) < START + 130
        assert len(lowered) == 6
        fleet.idle(360, **CALM)
        assert fleet.state.limits.max_model_len == 8192


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


class TestOutOfMemory:
    def test_a_device_oom_steps_down_at_once_and_blocks_the_value(self) -> None:
        fleet = Fleet(settings(start=Limits(8192, 0.98), max_utilization=0.98))
        fleet.look(gpu_memory_utilization=0.98)
        death = died(FailureClass.CUDA_OOM_AT_RUNTIME, fleet.now, serving=True)
        decision = fleet.see({}, [death])
        # 100 MB of 1200 MiB are 8 hundredths: more than 2 % and than a fifth of the headroom.
        assert decision.limits.gpu_memory_utilization == 0.90
        assert decision.source is Source.TUNED
        (change,) = decision.changes
        assert change.rule is Rule.OOM
        assert decision.learned.blocked[0].utilization == 0.98
        assert decision.learned.last_oom_at == death.at
        assert verdict(decision, "OOMDetected").reason == "DeviceMemoryOOM"
        assert [event.reason for event in decision.events] == ["OOM", "UtilizationLowered"]

    def test_the_same_death_counts_once(self) -> None:
        fleet = Fleet()
        death = died(FailureClass.CUDA_OOM_AT_RUNTIME, START, serving=True)
        for _ in range(5):
            fleet.see({"m-0": fleet.page("m-0")}, [death])
        assert fleet.state.oom.total == 1
        assert len(fleet.state.history) == 1
        assert fleet.learned.blocked[0].count == 1

    def test_an_oom_needs_no_metrics_and_no_settled_change(self) -> None:
        fleet = Fleet(follows=False)
        fleet.idle(10)
        unknown = Unknown(UnknownReason.UNREACHABLE, "m-1", "gone")
        death = died(FailureClass.CUDA_OOM_AT_RUNTIME, fleet.now, serving=True)
        decision = fleet.see({"m-1": unknown}, [death])
        assert decision.limits.gpu_memory_utilization == 0.82

    def test_nothing_is_raised_for_six_hours_and_never_to_the_blocked_value(self) -> None:
        fleet = Fleet(settings(max_utilization=0.98, tunes_length=False, floor=None))
        page = {**FULL, "device_free_low_water_bytes": 400 * MIB}
        fleet.see({}, [died(FailureClass.CUDA_OOM_AT_RUNTIME, START, serving=True)])
        low = fleet.state.limits.gpu_memory_utilization
        assert low == 0.88
        fleet.now = START + 6 * 3600 - 60
        fleet.idle(30, **page)
        assert fleet.state.limits.gpu_memory_utilization == low
        fleet.now = START + 6 * 3600 + 60
        decision = fleet.idle(3600, **page)
        assert decision.limits.gpu_memory_utilization == 0.88
        assert "ended in an OOM" in verdict(decision, "TuningLimited").message

    def test_a_second_death_blocks_for_a_week(self) -> None:
        fleet = Fleet(settings(mode=TuningMode.ADVISE))
        day = 24 * 3600.0
        for number in (1, 2):
            death = died(FailureClass.CUDA_OOM_AT_RUNTIME, START, number=number, serving=True)
            fleet.see({}, [death])
        assert fleet.learned.blocked[0].count == 2
        fleet.now = START + 6 * day
        assert fleet.look().target.gpu_memory_utilization == 0.88
        fleet.now = START + 8 * day
        assert fleet.look().target.gpu_memory_utilization == 0.90

    def test_two_replicas_dying_together_are_one_step(self) -> None:
        fleet = Fleet()
        engines = {pod: fleet.page(pod, limits_revision=0) for pod in ("m-0", "m-1")}
        fleet.see(engines)
        deaths = [
            died(FailureClass.CUDA_OOM_AT_RUNTIME, fleet.now, pod=pod, serving=True)
            for pod in ("m-0", "m-1")
        ]
        decision = fleet.see({}, deaths)
        assert decision.limits.gpu_memory_utilization == 0.82
        assert fleet.state.oom.total == 2

    def test_on_cpu_a_container_killed_while_serving_is_a_memory_oom(self) -> None:
        fleet = Fleet()
        fleet.idle(10)
        death = died(FailureClass.CGROUP_OOM, fleet.now - 2, started_at=START - 60)
        decision = fleet.see({}, [death])
        assert decision.limits.gpu_memory_utilization == 0.82
        assert verdict(decision, "OOMDetected").reason == "ContainerMemoryOOM"

    def test_the_length_goes_down_with_the_line_when_the_cache_would_not_hold_it(self) -> None:
        fleet = Fleet()
        fleet.idle(10, usable_blocks=512, **PLAN)
        death = died(FailureClass.CUDA_OOM_AT_RUNTIME, fleet.now, serving=True)
        decision = fleet.see({}, [death])
        assert decision.limits.gpu_memory_utilization == 0.82
        # 8 hundredths of 1024 blocks are missing.
        assert decision.limits.max_model_len == (512 - 82 - 1) * 16
        assert {change.rule for change in decision.changes} == {Rule.OOM}

    def test_the_outcome_of_a_change_before_an_oom_says_so(self) -> None:
        fleet = Fleet(settings(max_utilization=0.98))
        fleet.idle(15, **FULL)
        fleet.see({}, [died(FailureClass.CUDA_OOM_AT_RUNTIME, fleet.now, serving=True)])
        assert fleet.state.history[-2].outcome == "then m-0: it died"


class TestB16HostMemory:
    """Host memory runs out while weights load: not the limits' to answer."""

    @pytest.mark.parametrize("on_cpu", [False, True])
    def test_limits_in_force_do_not_change(self, on_cpu: bool) -> None:
        fleet = Fleet(settings(on_cpu=on_cpu, memory_limit="8Gi"))
        fleet.look()
        fleet.now = START + 600
        death = died(FailureClass.CGROUP_OOM, fleet.now - 5, started_at=fleet.now - 20, number=3)
        before = fleet.state.limits
        decision = fleet.see({}, [death])
        assert decision.limits == before
        assert decision.learned.blocked == ()
        found = verdict(decision, "OOMDetected")
        assert found.status is Status.TRUE
        assert found.reason == "HostMemoryOOM"
        assert "raise spec.resources.limits.memory (8Gi)" in found.message

    def test_while_serving_on_a_gpu_as_well(self) -> None:
        fleet = Fleet(settings(on_cpu=False, memory_limit="8Gi"))
        fleet.idle(10)
        decision = fleet.see({}, [died(FailureClass.CGROUP_OOM, fleet.now, serving=True)])
        assert decision.limits.gpu_memory_utilization == 0.90
        assert verdict(decision, "OOMDetected").reason == "HostMemoryOOM"

    def test_a_device_oom_has_the_other_reason(self) -> None:
        fleet = Fleet(settings(on_cpu=False))
        decision = fleet.see({}, [died(FailureClass.CUDA_OOM_AT_RUNTIME, START)])
        assert verdict(decision, "OOMDetected").reason == "DeviceMemoryOOM"

    def test_a_bare_kill_counts_as_neither(self) -> None:
        fleet = Fleet()
        decision = fleet.see({}, [died(FailureClass.ENGINE_DEAD, START, exit_code=137)])
        assert not holds(decision, "OOMDetected")
        assert fleet.state.oom.total == 0
        assert fleet.utilizations == [0.90]

    def test_three_failed_starts_are_enough(self) -> None:
        fleet = Fleet(settings(on_cpu=False, memory_limit="8Gi"))
        for number in (1, 2, 3):
            death = died(FailureClass.CGROUP_OOM, fleet.now, number=number, serving=False)
            decision = fleet.see({}, [death])
            assert (decision.give_up is not None) == (number == 3)
        assert decision.give_up is not None
        assert "8Gi" in decision.give_up.message


class TestFailedStarts:
    def test_b17_warm_up_lowers_the_fraction_and_gives_up_after_three(self) -> None:
        figures = {"max_num_seqs": 1024, "vocab_size": 151_936}
        fleet = Fleet(settings(start=Limits(8192, 0.95), max_utilization=0.95, on_cpu=False))
        for number in (1, 2, 3):
            death = died(
                FailureClass.CUDA_OOM_AT_START,
                fleet.now,
                number=number,
                serving=False,
                figures=figures,
            )
            decision = fleet.see({}, [death])
            assert decision.limits.max_model_len == 8192
        assert fleet.utilizations == [0.93, 0.91, 0.89]
        assert decision.give_up is not None
        assert decision.give_up.reason == "CudaOOMAtStart"
        for figure in ("1024", "151936", "622329856", "3 failed starts"):
            assert figure in decision.give_up.message

    def test_a_cache_too_small_raises_the_line_to_what_is_needed(self) -> None:
        fleet = Fleet(settings(max_utilization=0.96))
        death = died(
            FailureClass.KV_TOO_SMALL_FOR_MAX_LEN,
            START,
            figures={"gpu_memory_utilization_needed": 0.935},
        )
        decision = fleet.see({}, [death])
        assert decision.limits.gpu_memory_utilization == 0.94
        assert decision.changes[0].rule is Rule.KV_TOO_SMALL
        assert decision.give_up is None
        # The engine has not been started again yet.
        assert fleet.see({}, [death]).give_up is None

    def test_a_cache_too_small_at_the_maximum_is_the_users_to_solve(self) -> None:
        fleet = Fleet()
        death = died(
            FailureClass.KV_TOO_SMALL_FOR_MAX_LEN,
            START,
            suggested_flag="--max-model-len",
            suggested_value=4096,
        )
        decision = fleet.see({}, [death])
        assert fleet.utilizations == [0.90]
        assert decision.give_up is not None
        assert "max-model-len 4096 would work" in decision.give_up.message

    @pytest.mark.parametrize(
        ("failure_class", "starts"),
        [
            (FailureClass.INVALID_CONFIGURATION, 1),
            (FailureClass.MODEL_TOO_LARGE, 1),
            (FailureClass.MODEL_LOAD_FAILED, 3),
        ],
    )
    def test_when_trying_again_ends(self, failure_class: FailureClass, starts: int) -> None:
        fleet = Fleet()
        for number in range(1, starts + 1):
            decision = fleet.see({}, [died(failure_class, fleet.now, number=number)])
            assert (decision.give_up is not None) == (number == starts)

    def test_a_serving_replica_does_not_hide_that_another_can_never_start(self) -> None:
        fleet = Fleet()
        death = died(FailureClass.INVALID_CONFIGURATION, START, pod="m-1")
        assert fleet.see({"m-0": fleet.page("m-0")}, [death]).give_up is not None

    def test_a_new_generation_starts_to_count_anew(self) -> None:
        fleet = Fleet()
        for number in (1, 2):
            fleet.see({}, [died(FailureClass.MODEL_LOAD_FAILED, fleet.now, number=number)])
        fleet.settings = settings(generation=2)
        death = died(FailureClass.MODEL_LOAD_FAILED, fleet.now, number=3)
        assert fleet.see({}, [death]).give_up is None

    @pytest.mark.parametrize(
        "failure_class",
        [
            FailureClass.GPU_BUSY_AT_START,
            FailureClass.GPU_FAULT,
            FailureClass.COLLECTIVE_FAILURE,
            FailureClass.MODEL_LOAD_FAILED,
            FailureClass.ENGINE_DEAD,
            FailureClass.IMAGE_ERROR,
            FailureClass.UNSCHEDULABLE,
        ],
    )
    def test_what_teaches_the_limits_nothing(self, failure_class: FailureClass) -> None:
        fleet = Fleet()
        decision = fleet.see({}, [died(failure_class, START)])
        assert decision.learned == Learned()
        assert decision.changes == ()
        assert fleet.state.oom.total == 0


class TestUnknown:
    MISSING = Unknown(
        UnknownReason.METRIC_MISSING,
        "m-0",
        "vllm:kv_cache_usage_perc of model m is not on its page",
        "vllm:kv_cache_usage_perc",
    )

    def test_b05_nothing_is_raised_while_one_pod_is_unknown(self) -> None:
        fleet = Fleet()
        full = {"kv_cache_usage": 0.95, "waiting": 9}
        for _ in range(3):
            fleet.see({pod: fleet.page(pod, **full) for pod in ("m-0", "m-1")})
        lowered = fleet.state.limits.max_model_len
        assert lowered == 4096

        for _ in range(60):
            quiet = fleet.page("m-1", kv_cache_usage=0.20)
            decision = fleet.see({"m-0": self.MISSING, "m-1": quiet})
            assert decision.limits.max_model_len == lowered
            found = verdict(decision, "MetricsAvailable")
            assert found.status is Status.FALSE
            assert found.reason == "MetricMissing"
            assert "m-0" in found.message
            assert "vllm:kv_cache_usage_perc" in found.message
            assert not holds(decision, "TuningActive")
        assert events(fleet).count("MetricsUnavailable") == 1

        for _ in range(20):
            decision = fleet.see(
                {pod: fleet.page(pod, kv_cache_usage=0.20) for pod in ("m-0", "m-1")}
            )
        assert holds(decision, "MetricsAvailable")
        assert decision.limits.max_model_len == 8192

    def test_nothing_is_lowered_either(self) -> None:
        fleet = Fleet()
        for _ in range(20):
            fleet.see({"m-0": self.MISSING, "m-1": fleet.page("m-1", **FULL)})
        assert fleet.lengths == [8192]

    def test_a_pod_that_is_slow_once_freezes_without_an_alarm(self) -> None:
        fleet = Fleet()
        fleet.idle(10)
        slow = Unknown(UnknownReason.TIMED_OUT, "m-0", "no answer within 4 s")
        assert holds(fleet.see({"m-0": slow}), "MetricsAvailable")
        assert verdict(fleet.see({"m-0": slow}), "MetricsAvailable").reason == "ScrapeTimedOut"
        assert events(fleet) == ["MetricsUnavailable"]

    def test_stale_pages_freeze(self) -> None:
        fleet = Fleet()
        fleet.idle(10)
        stuck = {**FULL, "steps_total": 7.0, "kv_cache_usage": 0.92}
        for _ in range(10):
            decision = fleet.look(**stuck)
        assert verdict(decision, "MetricsAvailable").reason == "MetricsStale"
        assert len(fleet.lengths) <= 2

    def test_a_step_of_twenty_seconds_freezes_without_an_alarm(self) -> None:
        fleet = Fleet()
        fleet.idle(10)
        for step in (7.0, 8.0):
            for _ in range(round(20 / INTERVAL)):
                decision = fleet.look(**FULL, steps_total=step)
                assert holds(decision, "MetricsAvailable")
        assert "MetricsUnavailable" not in events(fleet)

    def test_no_engine_yet_is_neither_good_nor_bad(self) -> None:
        decision = Fleet().see({})
        assert verdict(decision, "MetricsAvailable").status is Status.UNKNOWN
        assert decision.limits == Limits(8192, 0.90)

    def test_the_worst_pod_decides(self) -> None:
        fleet = Fleet()
        fleet.idle(10)
        decision = fleet.see({"m-0": fleet.page("m-0"), "m-1": fleet.page("m-1", **FULL)})
        assert decision.limits.max_model_len == 4096
        assert decision.changes[0].reason.startswith("m-1:")


class TestInFlight:
    def test_no_second_change_before_the_engines_confirm_the_first(self) -> None:
        fleet = Fleet()
        fleet.idle(10)
        fleet.look(**FULL)
        fleet.follows = False
        for _ in range(10):
            decision = fleet.look(**FULL)
        assert fleet.lengths == [8192, 4096]
        assert holds(decision, "TuningActive")
        for _ in range(5):
            decision = fleet.look(**FULL)
        assert verdict(decision, "TuningActive").reason == "LimitsNotConfirmed"
        fleet.follows = True
        assert fleet.look(**FULL).limits.max_model_len == 2048

    def test_an_answer_over_the_control_channel_confirms_too(self) -> None:
        fleet = Fleet(follows=False)
        fleet.look()
        answer = LimitsOutcome(OutcomeKind.DEFERRED, "m-0", 1)
        fleet.see({"m-0": fleet.page("m-0")}, outcomes={"m-0": answer})
        fleet.see({"m-0": fleet.page("m-0")}, outcomes={"m-0": answer})
        decision = fleet.see({"m-0": fleet.page("m-0", **FULL)}, outcomes={"m-0": answer})
        assert decision.limits.max_model_len == 4096

    def test_a_refused_change_is_taken_back(self) -> None:
        fleet = Fleet()
        fleet.idle(10, device_free_low_water_bytes=30 * MIB)
        assert fleet.state.limits.gpu_memory_utilization == 0.87
        refusal = LimitsOutcome(OutcomeKind.REJECTED, "m-0", fleet.state.revision, "too small")
        page = fleet.page("m-0", limits_revision=1)
        decision = fleet.see({"m-0": page}, outcomes={"m-0": refusal})
        assert decision.limits.gpu_memory_utilization == 0.90
        assert decision.changes[0].rule is Rule.REJECTED
        assert decision.changes[0].reason == "m-0 refused: too small"

    def test_the_revision_overtakes_what_an_engine_reports(self) -> None:
        """A lost status must not leave the operator behind its own engines."""
        fleet = Fleet()
        assert fleet.look(limits_revision=41).revision == 42

    def test_the_outcome_is_written_once(self) -> None:
        fleet = Fleet()
        fleet.idle(10)
        fleet.look(**FULL)
        fleet.idle(60, kv_cache_usage=0.80, waiting=1, running=9)
        (change,) = fleet.state.history
        assert change.outcome == "cache 97% -> 80%, waiting 12 -> 1"


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
        assert decision.changes == ()
        assert events(fleet) == []
        assert verdict(decision, "TuningActive").reason == "Advise"

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
