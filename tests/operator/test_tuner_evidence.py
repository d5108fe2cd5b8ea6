"""What is unknown, and what is in flight: nothing moves."""

from __future__ import annotations

from plimsoll_operator.tuning.values import (
    Limits,
    LimitsOutcome,
    OutcomeKind,
    Rule,
    Status,
    Unknown,
    UnknownReason,
)
from support.tuning import (
    FULL,
    INTERVAL,
    MIB,
    Fleet,
    events,
    holds,
    verdict,
)


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
