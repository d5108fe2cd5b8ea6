"""Accounts add up: every arrival is in exactly one outcome, and percentiles are values that occurred."""

import pytest

from plimsoll_local.demo.outcomes import Account, Outcome, percentile, tally
from plimsoll_local.demo.traffic import Arrival, Kind


def account(
    outcome: Outcome, kind: Kind = Kind.SHORT, first: float | None = None, refusals: int = 0
) -> Account:
    arrival = Arrival(number=1, at_s=0.0, kind=kind, prompt_tokens=64, output_tokens=16)
    return Account(arrival, outcome, total_s=9.0, first_token_s=first, refusals=refusals)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([], 50, None),
        ([3.0], 50, 3.0),
        ([3.0], 99, 3.0),
        ([4.0, 1.0, 3.0, 2.0], 50, 2.0),
        ([4.0, 1.0, 3.0, 2.0], 99, 4.0),
        ([float(n) for n in range(1, 201)], 99, 198.0),
        ([2.0, 1.0], 0, 1.0),
    ],
)
def test_percentile_is_the_nearest_rank(
    values: list[float], percent: float, expected: float | None
) -> None:
    assert percentile(values, percent) == expected


def test_every_arrival_is_counted_once() -> None:
    counted = tally(
        [
            account(Outcome.ANSWERED, first=1.0),
            account(Outcome.ANSWERED, first=3.0, refusals=2),
            account(Outcome.ANSWERED, Kind.LONG, first=20.0),
            account(Outcome.GAVE_UP, Kind.LONG, refusals=5),
            account(Outcome.REFUSED, Kind.LONG),
            account(Outcome.FAILED),
        ]
    )
    assert counted.arrivals == 6
    assert sum(counted.by_outcome.values()) == counted.arrivals
    assert counted.answered == 3
    assert counted.refusals == 7
    assert counted.first_token_p50_s == {Kind.SHORT: 1.0, Kind.LONG: 20.0}
    assert counted.first_token_p99_s == {Kind.SHORT: 3.0, Kind.LONG: 20.0}


def test_the_first_token_of_a_failed_stream_is_no_latency() -> None:
    counted = tally([account(Outcome.FAILED, first=0.5)])
    assert counted.first_token_p50_s[Kind.SHORT] is None
