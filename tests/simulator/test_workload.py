"""What is injected, when, and that a seed means the same to every policy."""

from __future__ import annotations

import pytest

from plimsoll_simulator.traces import Arrival, Trace
from plimsoll_simulator.workload import INJECTIONS, InjectionError, build_workload

# One request of 1000 and 100 tokens a second, for ten minutes.
TRACE = Trace("steady", tuple(Arrival(float(second), 1000, 100) for second in range(600)))


def test_a_trace_is_repeated_until_the_run_is_full_and_thinned_by_chance() -> None:
    workload = build_workload(TRACE, keep=0.5, injection="B0", seed=1)
    assert workload.span == 3600.0
    assert 1650 < len(workload.requests) < 1950
    times = [request.time for request in workload.requests]
    assert times == sorted(times)
    assert times[-1] > 3500.0


@pytest.mark.parametrize("injection", INJECTIONS)
def test_the_same_seed_gives_the_same_workload_and_another_another(injection: str) -> None:
    first, again, other = (
        build_workload(TRACE, keep=0.1, injection=injection, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_b1_brings_long_prompts_for_ten_minutes_within_its_window() -> None:
    workload = build_workload(TRACE, keep=0.1, injection="B1", seed=3, rate=0.5)
    long = [request for request in workload.requests if request.is_long]
    (window,) = workload.windows
    assert 15 * 60 <= window.start <= 25 * 60
    assert window.end - window.start == 15 * 60
    assert 200 < len(long) < 400
    assert all(24_576 <= r.input_tokens <= 32_256 for r in long)
    assert all(window.start <= r.time < window.start + 600 for r in long)


def test_b4_lengthens_outputs_and_leaves_prompts() -> None:
    workload = build_workload(TRACE, keep=1.0, injection="B4", seed=3)
    assert {r.input_tokens for r in workload.requests} == {1000}
    assert {r.output_tokens for r in workload.requests} == {100, 400}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"injection": "B10"}, "--inject is 'B10'; expected one of B0, B1"),
        ({"keep": 0.0}, "--keep is 0.0; expected a share above 0"),
        ({"rate": -1.0}, "--rate is -1.0; expected requests per second above 0"),
    ],
)
def test_bad_input_is_named(changes: dict[str, object], expected: str) -> None:
    arguments: dict[str, object] = {"keep": 0.5, "injection": "B1", "seed": 1, **changes}
    with pytest.raises(InjectionError, match=expected):
        build_workload(TRACE, **arguments)  # type: ignore[arg-type]
