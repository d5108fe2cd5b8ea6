"""What the rules see, and what they answer with.

A proposal carries the value within the bounds and the one that was wanted without them; where the
bounds leave nothing, the two differ and the value is the present one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from plimsoll_operator.tuning.bounds import Bounds
from plimsoll_operator.tuning.policy import TuningPolicy
from plimsoll_operator.tuning.signals import Signals
from plimsoll_operator.tuning.values import (
    Change,
    Learned,
    Limits,
    LimitsOutcome,
    Parameter,
    Rule,
    Settings,
)


@dataclass(frozen=True)
class Situation:
    """Every pod known, nothing in flight. ``limits`` are in force; the ``_for`` are seconds between
    the first and the newest page of an unbroken run, None when there is none. ``slack``: caches
    have room and nobody is preempted, whoever waits."""

    settings: Settings
    policy: TuningPolicy
    signals: tuple[Signals, ...]
    bounds: Bounds
    limits: Limits
    learned: Learned
    history: tuple[Change, ...]
    revision: int
    outcomes: Mapping[str, LimitsOutcome]
    pressed_for: float | None
    calm_for: float | None
    slack_for: float | None
    now: float

    @property
    def length(self) -> int | None:
        """Admitted now; the top where nothing has been said."""
        length = self.limits.max_model_len
        return self.bounds.top if length is None else length

    @property
    def utilization(self) -> float:
        assert self.limits.gpu_memory_utilization is not None  # the spec's default at least
        return self.limits.gpu_memory_utilization

    def value(self, parameter: Parameter) -> float | None:
        """In force; where nothing was sent, what the engines started with."""
        found = self.limits.value(parameter)
        if found is not None:
            return found
        return {
            Parameter.MAX_MODEL_LEN: self.bounds.top,
            Parameter.MAX_NUM_SEQS: self.settings.max_num_seqs,
            Parameter.MAX_NUM_BATCHED_TOKENS: self.settings.max_num_batched_tokens,
        }.get(parameter)

    def since(self, parameter: Parameter) -> float:
        """Seconds since the last change of ``parameter``; infinite when there was none."""
        times = [change.time for change in self.history if change.parameter is parameter]
        return self.now - max(times, default=float("-inf"))

    def recovery_wait(self, parameter: Parameter) -> float:
        """How long it must be calm before ``parameter`` recovers: a settle time within a recovery,
        else longer for each recovery of the last day that did not last. So a load that flaps is
        followed once and then no more until it stops."""
        policy = self.policy
        if self.last_rule(parameter) is Rule.CALM:
            return policy.settle_scrapes * self.settings.scrape_interval
        return _nth(policy.recovery_waits, self.undone(parameter))

    def last_rule(self, parameter: Parameter) -> Rule | None:
        """Of its newest change that is remembered."""
        changes = [change for change in self.history if change.parameter is parameter]
        return max(changes, key=lambda change: change.time).rule if changes else None

    def turn_wait(self, parameter: Parameter, *, up: bool) -> float:
        """How long after its last change the balance may move ``parameter``: a moment in the same
        direction, longer for a turn, and for one upwards longer with each turn of the last day."""
        policy = self.policy
        steps = [
            (change.time, change.after > change.before)
            for change in self.history
            if change.parameter is parameter
            and change.before is not None
            and change.after is not None
            and self.now - change.time < policy.reversal_memory
        ]
        if not steps or steps[-1][1] is up:
            return policy.balance_interval
        turns = sum(one is not other for (_, one), (_, other) in itertools.pairwise(steps))
        return _nth(policy.turn_waits, turns if up else 0)

    def undone(self, parameter: Parameter) -> int:
        """Recoveries of the last day that did not last half an hour."""
        policy = self.policy
        changes = [change for change in self.history if change.parameter is parameter]
        return sum(
            before.rule is Rule.CALM
            and after.rule is not Rule.CALM
            and after.time - before.time < policy.reversal_gap
            for before, after in itertools.pairwise(changes)
            if self.now - after.time < policy.reversal_memory
        )

    def soon_after_oom(self) -> bool:
        last = self.learned.last_oom_at
        return last is not None and self.now - last < self.policy.no_raise_after_oom


def _nth(waits: tuple[float, ...], before: int) -> float:
    return waits[min(before, len(waits) - 1)]


@dataclass(frozen=True)
class Proposal:
    parameter: Parameter
    value: float
    uncapped: float
    rule: Rule
    reason: str
    expected: str
    inputs: Mapping[str, float] = field(default_factory=dict)
    # Why ``value`` is not ``uncapped``.
    limited: str | None = None
