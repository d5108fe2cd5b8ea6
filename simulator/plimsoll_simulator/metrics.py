"""What a run was worth. In: a RunRecord. Out: figures, with all arrivals in every denominator.

A request attains its objective when it was answered, retries included, within the time to the first
token and the time per output token of its class. Refused, lost and late ones count alike: otherwise
a policy could win by refusing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from plimsoll_simulator.records import DeathCause, Refusal, RequestRecord, RunRecord
from plimsoll_simulator.workload import Window, Workload


@dataclass(frozen=True)
class Objective:
    """Seconds."""

    time_to_first_token: float
    time_per_output_token: float


SHORT = Objective(2.0, 0.2)
LONG = Objective(30.0, 0.3)
# A class of fewer requests has no share worth the name.
_LEAST_OF_CLASS = 10
_REVERSAL_SECONDS = 30 * 60.0


@dataclass(frozen=True)
class ClassFigures:
    """Of short or of long requests. Times in seconds over the answered, None without any; the burst
    is the injection's window with its tail."""

    arrivals: int
    attainment: float | None
    burst_attainment: float | None
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p99: float | None
    burst_ttft_p99: float | None


@dataclass(frozen=True)
class Summary:
    """One run. Shares are of all arrivals; ``min_class`` is the attainment of the worse class, and
    ``burst_min_class`` the same of the arrivals in the injection's window with its tail (None
    without one). ``prompt_busy`` is the share of the window (or of the run) that the device needs
    for the prompts alone: above 0.8 no memory setting can help."""

    arrivals: int
    min_class: float
    burst_min_class: float | None
    prompt_busy: float
    short: ClassFigures
    long: ClassFigures
    request_goodput: float
    token_goodput: float
    oom_kills: int
    failed_starts: int
    restarts: int
    restarts_in_burst: int
    lost_in_flight: int
    inadmissible: int
    admissible_refused: int
    preemptions_per_1000: float
    recompute_tax: float
    kv_utilization: float
    memory_slack: float
    busy: float
    changes_per_hour: float
    reversals: int


def attains(record: RequestRecord) -> bool:
    first, per_token = record.time_to_first_token, record.time_per_output_token
    if first is None or per_token is None:
        return False
    objective = LONG if record.request.is_long else SHORT
    return first <= objective.time_to_first_token and per_token <= objective.time_per_output_token


def summarize(run: RunRecord, seconds_per_prompt_token: float) -> Summary:
    requests = run.requests
    in_burst = _within(run.workload, requests)
    short = _of_class(run, [r for r in requests if not r.request.is_long])
    long = _of_class(run, [r for r in requests if r.request.is_long])
    attained = [r for r in requests if attains(r)]
    largest_pool = max((s.pool_tokens for s in run.samples), default=0)
    unanswered = [r for r in requests if r.finished is None]
    refused = [r for r in unanswered if r.refusals and r.refusals[-1] is not Refusal.NOT_HERE]
    admissible = [
        r for r in refused if r.request.total_tokens <= min(run.native_length, largest_pool)
    ]
    hours = run.workload.span / 3600.0
    serving = [s for s in run.samples if s.serving]
    return Summary(
        arrivals=len(requests),
        min_class=min(_shares(requests), default=1.0),
        burst_min_class=min(_shares(in_burst), default=None),
        prompt_busy=prompt_busy(run.workload, seconds_per_prompt_token),
        short=short,
        long=long,
        request_goodput=len(attained) / max(1, len(requests)),
        token_goodput=_tokens(attained) / max(1, _tokens(requests)),
        oom_kills=sum(d.cause is not DeathCause.BUSY_AT_START for d in run.deaths),
        failed_starts=sum(d.cause is not DeathCause.OOM for d in run.deaths),
        restarts=len(run.restarts),
        restarts_in_burst=sum(any(r.time in w for w in run.workload.windows) for r in run.restarts),
        lost_in_flight=sum(r.lost for r in requests),
        inadmissible=len(refused) - len(admissible),
        admissible_refused=len(admissible),
        preemptions_per_1000=1000 * run.preemptions / max(1, len(requests)),
        recompute_tax=run.recomputed_tokens / max(1, run.computed_tokens),
        kv_utilization=_mean(s.held_tokens / s.pool_tokens for s in serving if s.pool_tokens),
        memory_slack=min((s.free_bytes / run.total_bytes for s in serving), default=0.0),
        busy=run.busy_seconds / max(run.end, 1.0),
        changes_per_hour=len(run.moves) / hours,
        reversals=_reversals(run),
    )


def prompt_busy(workload: Workload, seconds_per_prompt_token: float) -> float:
    windows = workload.windows or (Window(0.0, workload.span),)
    tokens = sum(r.input_tokens for r in workload.requests if any(r.time in w for w in windows))
    seconds = sum(min(w.end, workload.span) - w.start for w in windows)
    return tokens * seconds_per_prompt_token / max(seconds, 1.0)


def _shares(records: Sequence[RequestRecord]) -> list[float]:
    """Attainment of the classes that are large enough."""
    classes = [[r for r in records if r.request.is_long is long] for long in (False, True)]
    return [
        sum(map(attains, members)) / len(members)
        for members in classes
        if len(members) >= _LEAST_OF_CLASS
    ]


def _within(workload: Workload, records: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [r for r in records if any(r.request.time in w for w in workload.windows)]


def _of_class(run: RunRecord, records: Sequence[RequestRecord]) -> ClassFigures:
    burst = _within(run.workload, records)
    return ClassFigures(
        arrivals=len(records),
        attainment=_attainment(records),
        burst_attainment=_attainment(burst),
        ttft_p50=_percentile(records, lambda r: r.time_to_first_token, 50),
        ttft_p99=_percentile(records, lambda r: r.time_to_first_token, 99),
        tpot_p99=_percentile(records, lambda r: r.time_per_output_token, 99),
        burst_ttft_p99=_percentile(burst, lambda r: r.time_to_first_token, 99),
    )


def _attainment(records: Sequence[RequestRecord]) -> float | None:
    return sum(map(attains, records)) / len(records) if records else None


def _percentile(
    records: Iterable[RequestRecord], figure: Callable[[RequestRecord], float | None], percent: int
) -> float | None:
    values = [value for record in records if (value := figure(record)) is not None]
    return float(np.percentile(values, percent)) if values else None


def _tokens(records: Iterable[RequestRecord]) -> int:
    return sum(r.request.total_tokens for r in records)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.fmean(found) if found else 0.0


def _reversals(run: RunRecord) -> int:
    """A limit that came back to where it was within half an hour, after a change elsewhere."""
    count = 0
    for parameter in {move.parameter for move in run.moves}:
        moves = [move for move in run.moves if move.parameter == parameter]
        for first, second in pairwise(moves):
            soon = second.time - first.time <= _REVERSAL_SECONDS
            count += soon and second.after == first.before
    return count
