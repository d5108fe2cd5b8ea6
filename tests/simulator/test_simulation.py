"""Runs of small fleets: nothing is lost from the books, memory kills, clients retry once."""

from __future__ import annotations

import pytest

from plimsoll_simulator.hardware import LLAMA_3_1_8B, RTX_4090
from plimsoll_simulator.memory_model import CoTenant, DeviceMemory
from plimsoll_simulator.metrics import summarize
from plimsoll_simulator.policies import PLIMSOLL, PolicyError, build_policy, startable
from plimsoll_simulator.records import DeathCause, Refusal, RunRecord
from plimsoll_simulator.replica import DoesNotStart, EngineSettings, Replica, fit
from plimsoll_simulator.simulation import Controller, Fleet, NoController
from plimsoll_simulator.step_time import measured_rtx4090, seconds_per_prompt_token
from plimsoll_simulator.workload import SimulatedRequest, Window, Workload

STEP_TIME = measured_rtx4090()
PER_TOKEN = seconds_per_prompt_token(STEP_TIME)


def run(
    requests: list[tuple[float, int, int]],
    settings: EngineSettings,
    *,
    controller: Controller | None = None,
    cotenant: CoTenant | None = None,
    factor: float = 0.0,
    replicas: int = 1,
) -> RunRecord:
    """Requests are (time, prompt, output); 10 minutes."""
    asked = tuple(SimulatedRequest(n, *request) for n, request in enumerate(requests))
    workload = Workload(asked, (Window(0.0, 300.0),), 600.0, cotenant)
    fleet = [
        Replica(
            f"replica-{number}",
            RTX_4090,
            LLAMA_3_1_8B,
            STEP_TIME,
            DeviceMemory(
                RTX_4090, LLAMA_3_1_8B, seed=str(number), factor=factor, cotenant=cotenant
            ),
            settings,
        )
        for number in range(replicas)
    ]
    return Fleet(workload, fleet, controller or NoController()).run()


FITS = EngineSettings(0.90, fits_length=True)
SHORT = [(0.5 * n, 500, 100) for n in range(100)]


def test_every_request_is_answered_and_every_token_computed_once() -> None:
    record = run(SHORT, FITS)
    assert all(r.finished is not None and r.attempts == 1 for r in record.requests)
    # The last token of an answer is sampled, not computed.
    assert record.computed_tokens == sum(r.request.total_tokens - 1 for r in record.requests)
    summary = summarize(record, PER_TOKEN)
    assert (summary.min_class, summary.oom_kills, summary.preemptions_per_1000) == (1.0, 0, 0.0)


def test_two_replicas_share_the_requests() -> None:
    burst = [(0.0, 2000, 200)] * 40
    alone, together = run(burst, FITS), run(burst, FITS, replicas=2)
    longest = [max(r.finished or 0.0 for r in each.requests) for each in (alone, together)]
    assert longest[1] < 0.7 * longest[0]


def test_what_is_over_the_ceiling_is_refused_for_good_and_counted() -> None:
    record = run([*SHORT, (10.0, 30_000, 100)], EngineSettings(0.90, max_model_len=8192))
    refused = record.requests[-1]
    assert (refused.attempts, refused.refusals) == (1, [Refusal.NEVER])
    summary = summarize(record, PER_TOKEN)
    assert (summary.admissible_refused, summary.inadmissible) == (1, 0)
    assert summary.request_goodput == pytest.approx(100 / 101)


def test_a_neighbour_that_takes_the_rest_kills_and_the_client_retries_once() -> None:
    tenant = CoTenant(start=20.0, seconds=60.0, bytes=3e9)
    record = run(SHORT, FITS, cotenant=tenant)
    first, *others = record.deaths
    assert first.cause is DeathCause.OOM
    assert first.lost > 0
    # The start after 120 s finds the device free again.
    assert others == []
    assert max(r.attempts for r in record.requests) == 2
    unanswered = [r for r in record.requests if r.finished is None]
    assert unanswered
    assert all(r.attempts == 2 for r in unanswered)


def test_a_start_waits_until_the_share_of_the_device_is_free() -> None:
    tenant = CoTenant(start=20.0, seconds=200.0, bytes=3e9)
    record = run(SHORT, FITS, cotenant=tenant)
    causes = [death.cause for death in record.deaths]
    assert causes[0] is DeathCause.OOM
    assert set(causes[1:]) == {DeathCause.BUSY_AT_START}


def test_a_cache_too_small_for_one_request_does_not_start() -> None:
    with pytest.raises(DoesNotStart, match="one request of 131072 needs more"):
        fit(RTX_4090, LLAMA_3_1_8B, EngineSettings(0.90))
    policy, starts = startable(build_policy("S2", RTX_4090, LLAMA_3_1_8B), RTX_4090, LLAMA_3_1_8B)
    assert not starts
    # 45.2k tokens at 0.92, by the protocol's own sum.
    assert fit(RTX_4090, LLAMA_3_1_8B, policy.settings).length // 100 == 452


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(PolicyError, match=r"policy 'S99' is not known; expected one of S1, S2"):
        build_policy("S99", RTX_4090, LLAMA_3_1_8B)


def test_the_tuner_moves_limits_of_a_pressed_fleet_and_the_same_way_each_time() -> None:
    pressed = [(0.25 * n, 3000, 200) for n in range(120)]

    def tuned() -> RunRecord:
        policy = build_policy(PLIMSOLL, RTX_4090, LLAMA_3_1_8B)
        return run(pressed, policy.settings, controller=policy.controller(), factor=1.0)

    first, again = tuned(), tuned()
    assert "maxModelLen" in {move.parameter for move in first.moves}
    assert first.moves == again.moves
    assert [r.finished for r in first.requests] == [r.finished for r in again.requests]
    line = {sample.utilization for sample in first.samples}
    assert all(0.80 <= value <= 0.94 for value in line)


def test_a_bound_on_long_prompts_that_wait_refuses_the_rest_and_lets_short_ones_in() -> None:
    """Each long prompt has 24 GB nearly for itself."""
    flood = sorted([*SHORT, *((float(n), 30_000, 500) for n in range(1, 13))])

    def refused(name: str) -> list[int]:
        policy, _ = startable(build_policy(name, RTX_4090, LLAMA_3_1_8B), RTX_4090, LLAMA_3_1_8B)
        record = run(flood, policy.settings)
        return [r.request.input_tokens for r in record.requests if r.finished is None]

    assert refused("S8") == []
    bounded = refused("S8+queue")
    assert len(bounded) >= 8
    assert set(bounded) == {30_000}
