"""All pages of one pass together with those before them.

In: the engines as read and the state of the last pass. Out: :class:`Evidence`: what is known of each
pod, and how long the fleet has been pressed, calm or unknown. One pod that is not known makes the
fleet unknown: nothing may be concluded from the others alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plimsoll_operator.tuning.policy import TuningPolicy
from plimsoll_operator.tuning.pressure import has_slack, is_calm, pressure
from plimsoll_operator.tuning.signals import Signals, Window, extend, judge
from plimsoll_operator.tuning.values import (
    EngineReading,
    OutcomeKind,
    TuningInputs,
    Unknown,
    UnknownReason,
)

# A pod that is slow or away once is not reported at once; a page that lacks something is.
_MAY_PASS = (UnknownReason.TIMED_OUT, UnknownReason.UNREACHABLE, UnknownReason.STALE)
# A step on a shared core can take as long as a few scrapes: seconds that pages stay stale, and
# freeze the tuner, before that is an alarm.
_STALE_SHOWN_AFTER = 30.0


@dataclass(frozen=True)
class Evidence:
    """Signals and unknowns are sorted by pod. The ``_since`` are times of the first page (or pass)
    of an unbroken run, None outside one; ``seen_at`` is the time of the newest page."""

    windows: Mapping[str, Window]
    signals: tuple[Signals, ...]
    unknowns: tuple[Unknown, ...]
    seen_at: float | None
    pressed_since: float | None
    calm_since: float | None
    slack_since: float | None
    unknown_since: float | None

    @property
    def complete(self) -> bool:
        return bool(self.signals) and not self.unknowns

    @property
    def readings(self) -> tuple[EngineReading, ...]:
        return tuple(signals.reading for signals in self.signals)

    @property
    def latest(self) -> tuple[EngineReading, ...]:
        """The newest page of every pod, also of one that has just died."""
        return tuple(window[-1] for _, window in sorted(self.windows.items()))

    def lasting(self, since: float | None) -> float | None:
        """Seconds from the first page of a run to the newest."""
        return None if since is None or self.seen_at is None else self.seen_at - since


def gather(inputs: TuningInputs, policy: TuningPolicy) -> Evidence:
    state, settings, now = inputs.state, inputs.settings, inputs.now
    windows = _windows(inputs, policy)
    judged = [
        found if isinstance(found, Unknown) else judge(windows[pod])
        for pod, found in sorted(inputs.engines.items())
    ]
    signals = tuple(found for found in judged if isinstance(found, Signals))
    unknowns = tuple(found for found in judged if isinstance(found, Unknown))
    complete = bool(signals) and not unknowns
    seen_at = max((found.reading.at for found in signals), default=None)
    pressed = complete and any(pressure(s, settings, policy) is not None for s in signals)
    calm = complete and all(is_calm(s, policy) for s in signals)
    slack = complete and all(has_slack(s, policy) for s in signals)
    return Evidence(
        windows=windows,
        signals=signals,
        unknowns=unknowns,
        seen_at=seen_at,
        pressed_since=_run(pressed, state.pressed_since, seen_at),
        calm_since=_run(calm, state.calm_since, seen_at),
        slack_since=_run(slack, state.slack_since, seen_at),
        unknown_since=_run(bool(unknowns), state.unknown_since, now),
    )


def _windows(inputs: TuningInputs, policy: TuningPolicy) -> dict[str, Window]:
    """Pods that cannot be read now keep their pages for a while: their death is judged by them."""
    windows = {
        pod: window
        for pod, window in inputs.state.windows.items()
        if window and inputs.now - window[-1].at <= policy.window
    }
    for pod, reading in inputs.engines.items():
        if isinstance(reading, EngineReading):
            windows[pod] = extend(windows.get(pod, ()), reading, policy.window)
    return windows


def _run(holds: bool, since: float | None, now: float | None) -> float | None:
    if not holds:
        return None
    return now if since is None else since


def is_reportable(evidence: Evidence, scrape_interval: float, now: float) -> bool:
    """Whether missing metrics are to be shown now, and not first be waited for."""
    if any(unknown.reason not in _MAY_PASS for unknown in evidence.unknowns):
        return True
    since = evidence.unknown_since
    stale = any(unknown.reason is UnknownReason.STALE for unknown in evidence.unknowns)
    # Two passes are never exactly one interval apart.
    patience = _STALE_SHOWN_AFTER if stale else 0.8 * scrape_interval
    return since is not None and now - since >= patience


def unconfirmed(inputs: TuningInputs, evidence: Evidence) -> tuple[str, ...]:
    """Pods that have neither reported nor acknowledged the revision in force."""
    revision = inputs.state.revision
    acknowledged = {
        pod
        for pod, outcome in inputs.outcomes.items()
        if outcome.revision >= revision
        and outcome.kind in (OutcomeKind.APPLIED, OutcomeKind.DEFERRED)
    }
    return tuple(
        reading.pod
        for reading in evidence.readings
        if reading.pod not in acknowledged
        and (reading.limits_revision is None or reading.limits_revision < revision)
    )
