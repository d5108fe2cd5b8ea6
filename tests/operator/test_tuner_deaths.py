"""What deaths of engines teach the limits."""

from __future__ import annotations

import pytest

from plimsoll_operator.spec import TuningMode
from plimsoll_operator.tuning.values import (
    FailureClass,
    Learned,
    Limits,
    Rule,
    Source,
    Status,
    Unknown,
    UnknownReason,
)
from support.tuning import (
    FULL,
    MIB,
    PLAN,
    START,
    Fleet,
    died,
    holds,
    settings,
    verdict,
)


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
