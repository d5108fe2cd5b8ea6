"""When a move that costs a restart of every pod is worth it.

In: the situation and a proposal. Out: yes, or the reason why not. For runtimes that read a limit
only when they start; where limits move live, nobody asks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from plimsoll_operator.tuning.situation import Proposal, Situation
from plimsoll_operator.tuning.values import Change, Parameter

DAY = 86_400.0


def restarts_of_the_day(history: Iterable[Change], live: Collection[Parameter], now: float) -> int:
    """Moves in the last 24 hours that cost a restart of every pod."""
    return sum(now - c.time < DAY for c in history if c.parameter not in live)


def why_not_restart(situation: Situation, proposal: Proposal) -> str | None:
    """Only in a valley, within the budget of the day, and where a raise repays itself.

    The gain of a larger cache is counted in seconds of service: how much larger it is, times the
    part of the windows of past days in which more was wanted than there was, times the horizon. A
    restart costs the drain and the start of each pod; all pods gain and pay alike.
    """
    policy, settings = situation.policy, situation.settings
    ages = [situation.now - c.time for c in situation.history if c.parameter not in settings.live]
    if min(ages, default=DAY) < policy.restart_interval:
        return f"the last restart is less than {policy.restart_interval / 60:g} min ago"
    used = restarts_of_the_day(situation.history, settings.live, situation.now)
    if used >= settings.max_restarts_per_day:
        return f"spec.tuning.maxRestartsPerDay of {settings.max_restarts_per_day} is used up"
    fullest = max((signals.usage for signals in situation.signals), default=1.0)
    calm = (situation.calm_for or 0.0) >= policy.valley_calm
    if not calm or fullest > policy.valley_usage:
        return "a restart waits for a valley of the traffic"
    now = situation.value(proposal.parameter) or 0.0
    if proposal.value < now:
        # Safety is not weighed, only timed.
        return None
    short = situation.learned.peaks.demand.share_above(1.0) or 0.0
    longest, later = (situation.bounds.longest_at(line) for line in (now, proposal.value))
    growth = later / longest - 1 if longest and later else proposal.value - now
    gain, cost = growth * short * policy.restart_horizon, settings.drain + policy.start_time
    if gain <= cost:
        return f"a restart would gain {gain:.0f} s of service in a day and cost {cost:.0f} s"
    return None
