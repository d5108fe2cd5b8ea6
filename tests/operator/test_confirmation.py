"""What the tuner says of limits that no engine has taken over, and of deaths and modes since past."""

from __future__ import annotations

import pytest

from plimsoll_operator.quantities import parse_quantity
from plimsoll_operator.spec import TuningMode
from plimsoll_operator.tuning.policy import DEFAULT_POLICY
from plimsoll_operator.tuning.values import (
    Blocked,
    Failure,
    FailureClass,
    Learned,
    Limits,
    LimitsOutcome,
    OOMRecord,
    OutcomeKind,
    TuningDecision,
    Verdict,
)
from plimsoll_operator.tuning.verdicts import oom_detected
from support.tuning import INTERVAL, START, Fleet, settings

SSL = "10.0.0.7:8001: UNAVAILABLE Ssl handshake failed: CERTIFICATE_VERIFY_FAILED"
IN_FORCE = "the spec's values are in force"


def tuning_active(decision: TuningDecision) -> Verdict:
    return next(each for each in decision.verdicts if each.type == "TuningActive")


@pytest.mark.parametrize("mode", list(TuningMode))
@pytest.mark.parametrize(
    ("kind", "reason", "remedy"),
    [
        (OutcomeKind.UNREACHABLE, SSL, True),
        (OutcomeKind.UNAUTHENTICATED, "the bearer token is missing or wrong", True),
        (OutcomeKind.UNREACHABLE, "10.0.0.7:8001: DEADLINE_EXCEEDED", False),
        (OutcomeKind.REJECTED, "too small", False),
    ],
)
def test_limits_that_no_engine_has_are_never_said_to_be_in_force(
    mode: TuningMode, kind: OutcomeKind, reason: str, remedy: bool
) -> None:
    fleet = Fleet()
    fleet.idle(20, kv_cache_usage=0.97, waiting=12)
    fleet.follows = False
    fleet.settings = settings(mode=mode)
    outcome = LimitsOutcome(kind, "m-0", fleet.state.revision, reason)
    for _ in range(20):
        decision = fleet.see({"m-0": fleet.page("m-0")}, outcomes={"m-0": outcome})
        verdict = tuning_active(decision)
        assert decision.unconfirmed == ("m-0",)
        assert IN_FORCE not in verdict.message
    assert verdict.reason in ("LimitsNotConfirmed", "LimitsRejected")
    assert reason in verdict.message
    assert ("delete the pod" in verdict.message) is remedy


def test_an_engine_that_starts_later_has_its_own_time_to_take_the_limits_over() -> None:
    fleet = Fleet(follows=False)
    fleet.see({})
    for _ in range(40):
        fleet.see({})
    reasons = [tuning_active(fleet.look()).reason for _ in range(20)]
    assert reasons[0] == "Auto"
    late = reasons.index("LimitsNotConfirmed")
    assert set(reasons[:late]) == {"Auto"}
    assert late * INTERVAL == pytest.approx(DEFAULT_POLICY.confirm_timeout, abs=INTERVAL)


def test_off_says_so_once_the_engines_have_the_specs_values() -> None:
    fleet = Fleet()
    fleet.idle(20, kv_cache_usage=0.97, waiting=12)
    fleet.settings = settings(mode=TuningMode.OFF)
    assert IN_FORCE not in tuning_active(fleet.look()).message
    decision = fleet.look()
    assert (decision.unconfirmed, tuning_active(decision).reason) == ((), "Off")
    assert IN_FORCE in tuning_active(decision).message


@pytest.mark.parametrize("before", [TuningMode.OFF, TuningMode.ADVISE])
@pytest.mark.parametrize("by_way_of", [(), (TuningMode.HOLD,), (TuningMode.HOLD, TuningMode.HOLD)])
def test_auto_starts_from_what_was_learned_by_whatever_way(
    before: TuningMode, by_way_of: tuple[TuningMode, ...]
) -> None:
    blocked = Blocked(0.85, 0.80, START, FailureClass.CGROUP_OOM)
    fleet = Fleet(settings(mode=before), Learned(blocked=(blocked,)))
    for mode in (before, *by_way_of, TuningMode.AUTO):
        fleet.settings = settings(mode=mode)
        decision = fleet.look()
    assert decision.limits.gpu_memory_utilization == 0.80


def test_hold_keeps_what_was_tuned_for_auto() -> None:
    blocked = Blocked(0.85, 0.80, START, FailureClass.CGROUP_OOM)
    fleet = Fleet(learned=Learned(blocked=(blocked,)))
    fleet.look()
    fleet.learned = Learned()
    for mode in (TuningMode.HOLD, TuningMode.AUTO):
        fleet.settings = settings(mode=mode)
        assert fleet.look().limits == Limits(8192, 0.80)


@pytest.mark.parametrize(
    ("now", "advised"),
    [("100Mi", True), ("50Mi", True), ("102400Ki", True), ("768Mi", False), ("1G", False), (None, True)],
)  # fmt: skip
def test_the_advice_after_an_oom_goes_when_it_was_followed(now: str | None, advised: bool) -> None:
    message = "killed at its memory limit of 100Mi (OOMKilled, exit status 137)"
    death = Failure(FailureClass.CGROUP_OOM, "u/1", "m-0", message, at=START)
    oom = OOMRecord(1, death, host_memory=True)
    verdict = oom_detected(oom, settings(memory_limit=now), DEFAULT_POLICY, START)
    assert message in verdict.message
    assert ("raise spec.resources.limits.memory" in verdict.message) is advised


@pytest.mark.parametrize(
    ("quantity", "number"),
    [("1Gi", 2**30), ("1G", 10**9), ("1.5k", 1500), ("1e3", 1000), ("2E", 2 * 10**18), ("7", 7)],
)
def test_quantities(quantity: str, number: int) -> None:
    assert parse_quantity(quantity) == number


@pytest.mark.parametrize("quantity", ["", "Gi", "1Xi", "much"])
def test_no_quantity(quantity: str) -> None:
    assert parse_quantity(quantity) is None
