"""What became of every arrival, and the figures that follow from it.

In:  one Account per arrival.
Out: counts by outcome that add up to all arrivals, and percentiles of the time to the first token.

Pure. Knows nothing of HTTP or of the cluster.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from plimsoll_local.demo.traffic import Arrival, Kind


class Outcome(Enum):
    """The one end of an arrival. The values are the words of the table."""

    ANSWERED = "answered"
    REFUSED = "refused (400)"
    GAVE_UP = "gave up after 429s"
    FAILED = "failed"


@dataclass(frozen=True)
class Account:
    """The end of one arrival.

    first_token_s: from arrival to the first token, waits after a 429 included; None without a token.
    total_s:       from arrival to the end, whatever it was.
    refusals:      429 answers on the way.
    detail:        for anything but ANSWERED, what the client saw.
    """

    arrival: Arrival
    outcome: Outcome
    total_s: float
    first_token_s: float | None = None
    refusals: int = 0
    detail: str | None = None


@dataclass(frozen=True)
class Tally:
    """Counts and latencies of one deployment's burst; `by_outcome` sums to `arrivals`."""

    arrivals: int
    by_outcome: dict[Outcome, int]
    refusals: int
    first_token_p50_s: dict[Kind, float | None]
    first_token_p99_s: dict[Kind, float | None]

    @property
    def answered(self) -> int:
        return self.by_outcome[Outcome.ANSWERED]


def tally(accounts: Sequence[Account]) -> Tally:
    """Adds accounts up. Latencies are those of answered arrivals of their kind."""
    counted = Counter(account.outcome for account in accounts)
    latencies: dict[Kind, list[float]] = {kind: [] for kind in Kind}
    for account in accounts:
        if account.outcome is Outcome.ANSWERED and account.first_token_s is not None:
            latencies[account.arrival.kind].append(account.first_token_s)
    return Tally(
        arrivals=len(accounts),
        by_outcome={outcome: counted[outcome] for outcome in Outcome},
        refusals=sum(account.refusals for account in accounts),
        first_token_p50_s={kind: percentile(values, 50) for kind, values in latencies.items()},
        first_token_p99_s={kind: percentile(values, 99) for kind, values in latencies.items()},
    )


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The nearest-rank percentile: a value that occurred. None of nothing.

    With the demo's few dozen requests p99 is the largest value, and the table shows it as that.
    """
    if not values:
        return None
    rank = max(1, math.ceil(percent / 100 * len(values)))
    return sorted(values)[rank - 1]
