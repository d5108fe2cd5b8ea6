"""Rules about who enters the cache, and when: the lane, the watermark, sequences, the length.

A cache that is short is answered in this order, each step only when the one before is exhausted or
does not apply: long prompts wait in their lane (always); less of the cache is filled at once, when
requests are preempted; and when short prompts wait although the lane has no more to give them, the
longest are told to come back.
"""

from __future__ import annotations

from collections.abc import Iterable

from plimsoll_operator.tuning.forecast import most_that_fit, predict_peak
from plimsoll_operator.tuning.lane import long_prompt_tokens
from plimsoll_operator.tuning.pressure import Pressure, is_preempting, worst_pressure
from plimsoll_operator.tuning.signals import Signals
from plimsoll_operator.tuning.situation import Proposal, Situation
from plimsoll_operator.tuning.values import LANE, Parameter, Rule

_SEQS = Parameter.MAX_NUM_SEQS


def fit_lane(situation: Situation) -> Proposal | None:
    """The cache or the ceiling is of another size than the lane was made for."""
    now, settings = situation.limits.long_prompt_tokens, situation.settings
    if now is None or not settings.may_move(Parameter.LONG_PROMPT_TOKENS):
        return None
    wanted = long_prompt_tokens(situation.bounds, settings.block_size, situation.policy)
    if abs(wanted - now) < situation.policy.lane_deadband * now:
        return None
    return Proposal(
        Parameter.LONG_PROMPT_TOKENS,
        wanted,
        wanted,
        Rule.LANE,
        "the size of the cache, or the ceiling",
        f"prompts of more than {wanted} tokens are long",
    )


def fit_share(situation: Situation) -> Proposal | None:
    """What short prompts have held at their peaks, without a queue, is kept free of long ones."""
    policy, short = situation.policy, situation.learned.peaks.short
    now, share = situation.limits.long_prompt_share, Parameter.LONG_PROMPT_SHARE
    peak = short.quantile(policy.short_quantile)
    if now is None or peak is None or not situation.settings.may_move(share):
        return None
    if short.total < policy.short_windows or situation.since(share) < policy.share_interval:
        return None
    if situation.last_rule(share) is Rule.BALANCE:
        # Who waits is a better witness than who was there in past hours.
        return None
    wanted = round(1 - policy.short_margin * peak, 2)
    value = min(max(wanted, policy.long_share_least), policy.long_share_most)
    if abs(value - now) < policy.share_deadband:
        return None
    return Proposal(
        share,
        value,
        wanted,
        Rule.SHORT_DEMAND,
        f"short prompts held {peak:.0%} of the cache at their peaks",
        f"long prompts hold at most {value:.0%}",
        {"shortPeak": peak},
    )


def balance_lane(situation: Situation) -> Proposal | None:
    """Long prompts or the others have waited too long for what they may wait, and the other side
    has not: the lane gives or takes a step."""
    policy, settings, share = situation.policy, situation.settings, Parameter.LONG_PROMPT_SHARE
    now = situation.limits.long_prompt_share
    if now is None or not settings.may_move(share):
        return None
    goal = settings.time_to_first_token
    short = _longest(signals.short_wait for signals in situation.signals)
    long = _longest(signals.long_wait for signals in situation.signals)
    if short is None or long is None:
        return None
    of_short, of_long = short / goal, long / (policy.long_patience * goal)
    more, less = max(of_short, of_long), min(of_short, of_long)
    if more < policy.balance_pressed or more < policy.balance_ratio * less:
        return None
    up = of_long > of_short
    if situation.since(share) < situation.turn_wait(share, up=up):
        return None
    wanted = round(now + (policy.balance_step if up else -policy.balance_step), 2)
    value = min(max(wanted, policy.long_share_least), policy.balance_most)
    if (value > now) is not up or value == now:
        return None
    return Proposal(
        share,
        value,
        wanted,
        Rule.BALANCE,
        f"the first long prompt has waited {long:.1f} s of {policy.long_patience * goal:g} s, "
        f"the first other {short:.1f} s of {goal:g} s",
        f"long prompts hold at most {value:.0%}",
        {"longWait": long, "shortWait": short},
    )


def hold_back_growth(situation: Situation) -> Proposal | None:
    """Requests are preempted: those that run outgrow the cache. More of it is kept free at each
    admission; when that is exhausted, fewer run at once."""
    policy = situation.policy
    found = [signals for signals in situation.signals if is_preempting(signals, policy)]
    if not found:
        return None
    worst = max(found, key=lambda s: (s.preemption_rate or 0.0, s.pod))
    reason = f"{worst.pod}: cache {worst.usage:.0%} full, {worst.preemption_rate:.2g} preemptions/s"
    inputs = {"kvCacheUsage": worst.usage, "preemptionsPerSecond": worst.preemption_rate or 0.0}
    return _raise_watermark(situation, worst, reason, inputs) or _run_fewer(
        situation, worst, reason, inputs
    )


def _raise_watermark(
    situation: Situation, worst: Signals, reason: str, inputs: dict[str, float]
) -> Proposal | None:
    """By a step, or at once to what the running are foretold to grow by."""
    policy, now = situation.policy, situation.limits.watermark
    may = situation.settings.may_move(Parameter.WATERMARK)
    if now is None or not may or now >= policy.watermark_most:
        return None
    wanted = now + policy.watermark_step
    pool, running = worst.pool_tokens, worst.reading.running
    if pool and running:
        held = worst.usage * pool
        peak = predict_peak(held, running, situation.learned.peaks.outputs)
        wanted = max(wanted, 0.0 if peak is None else (peak - held) / pool)
    wanted = round(wanted, 3)
    value = min(wanted, policy.watermark_most)
    return Proposal(
        Parameter.WATERMARK,
        value,
        wanted,
        Rule.PREEMPTION,
        reason,
        f"{value:.1%} of the cache stays free for the growth of those that run",
        inputs,
    )


def _run_fewer(
    situation: Situation, worst: Signals, reason: str, inputs: dict[str, float]
) -> Proposal | None:
    """As many as the cache is foretold to carry to their end; without a forecast, a fifth less."""
    policy, now, running = situation.policy, situation.value(_SEQS), worst.reading.running
    if now is None or not running or not situation.settings.may_move(_SEQS):
        return None
    if situation.since(_SEQS) < policy.seqs_interval:
        return None
    fit = None
    if pool := worst.pool_tokens:
        outputs = situation.learned.peaks.outputs
        fit = most_that_fit(worst.usage * pool, running, outputs, pool)
    least = max(1, int(running * policy.seqs_down_factor))
    # Less than half at once is more than a forecast is trusted with.
    value = least if fit is None else max(min(fit, least), running // 2, 1)
    if value >= now:
        return None
    return Proposal(
        _SEQS,
        value,
        value,
        Rule.PREEMPTION,
        f"{reason}, {running} running",
        f"{value} run at once and end without being preempted",
        inputs,
    )


def let_more_run(situation: Situation) -> Proposal | None:
    """Room in the cache again: half as many more at once, up to the spec's; then a smaller
    watermark, once that has lasted."""
    policy, settings = situation.policy, situation.settings
    slack, whole = situation.slack_for, settings.max_num_seqs
    if slack is None:
        return None
    seqs, watermark = situation.limits.max_num_seqs, situation.limits.watermark
    reason = f"room in the cache for {slack:.0f} s"
    if seqs is not None and whole is not None and seqs < whole and settings.may_move(_SEQS):
        if min(slack, situation.since(_SEQS)) < situation.recovery_wait(_SEQS):
            return None
        more = min(whole, max(seqs + 1, int(seqs * policy.seqs_up_factor)))
        return Proposal(_SEQS, more, more, Rule.CALM, reason, f"up to {more} run at once again")
    parameter = Parameter.WATERMARK
    if watermark is None or watermark <= policy.watermark or not settings.may_move(parameter):
        return None
    wait = max(policy.watermark_hold, situation.recovery_wait(parameter))
    if min(slack, situation.since(parameter)) < wait:
        return None
    less = max(policy.watermark, round(watermark - policy.watermark_step, 3))
    expected = f"{less:.1%} of the cache stays free"
    return Proposal(parameter, less, less, Rule.CALM, reason, expected)


def admit_less(situation: Situation) -> Proposal | None:
    """The queue does not clear: admit shorter requests only, so that those inside can finish."""
    policy, length, floor = situation.policy, situation.length, situation.bounds.floor
    pressed = worst_pressure(situation.signals, situation.settings, policy)
    if length is None or floor is None or pressed is None or situation.pressed_for is None:
        return None
    if situation.pressed_for < _patience(situation, pressed):
        return None
    if _is_the_lanes(situation, pressed):
        return None
    wanted = _whole_blocks(length * policy.length_down_factor, situation)
    value = max(wanted, floor)
    signals = pressed.signals
    return Proposal(
        Parameter.MAX_MODEL_LEN,
        min(value, length),
        wanted,
        Rule.PRESSURE,
        pressed.reason,
        f"requests above {min(value, length)} tokens come back later, those inside finish",
        {
            "kvCacheUsage": signals.usage,
            "waiting": signals.reading.waiting,
            "preemptionsPerSecond": signals.preemption_rate or 0.0,
        },
        f"maxModelLen is at its floor of {floor}" if wanted < floor else None,
    )


def _is_the_lanes(situation: Situation, pressed: Pressure) -> bool:
    """Whether the queue is still the lane's to clear. A load that comes and goes clears by itself,
    and to refuse what would only have waited helps nobody. So it takes short prompts that wait
    although the lane has had its time and has no more to give them, or preemptions although no more
    can be kept free."""
    policy, settings, limits = situation.policy, situation.settings, situation.limits
    if not all(settings.may_move(parameter) for parameter in LANE):
        return False
    at_most = (limits.watermark or 0.0) >= policy.watermark_most
    if at_most and is_preempting(pressed.signals, policy):
        return False
    tried = min(situation.pressed_for or 0.0, situation.since(Parameter.LONG_PROMPT_SHARE))
    if tried < policy.long_patience * settings.time_to_first_token:
        return True
    short = _longest(signals.short_wait for signals in situation.signals)
    if short is None:
        return False
    narrowest = (limits.long_prompt_share or 0.0) <= policy.long_share_least
    return not narrowest or short < settings.time_to_first_token


def _patience(situation: Situation, pressed: Pressure) -> float:
    """Mild pressure must be on two pages; they are never exactly one interval apart."""
    return 0.0 if pressed.severe else 0.8 * situation.settings.scrape_interval


def admit_more(situation: Situation) -> Proposal | None:
    """Calm for long enough: admit longer requests again, up to the ceiling."""
    length, top, calm_for = situation.length, situation.bounds.top, situation.calm_for
    if length is None or top is None or situation.bounds.floor is None or calm_for is None:
        return None
    if length >= top:
        return None
    wait = situation.recovery_wait(Parameter.MAX_MODEL_LEN)
    if min(calm_for, situation.since(Parameter.MAX_MODEL_LEN)) < wait:
        return None
    wanted = min(int(length * situation.policy.length_up_factor), top)
    longest = situation.bounds.longest_at(situation.utilization)
    # The top itself need not be whole blocks.
    value = top if wanted >= top else _whole_blocks(wanted, situation)
    limited = None
    if longest is not None and longest < value:
        # A few blocks more are not worth a change.
        worth = longest >= length * (1 + situation.policy.length_gain_min)
        value = longest if worth else length
        limited = f"the cache holds no request longer than {longest} tokens"
    return Proposal(
        Parameter.MAX_MODEL_LEN,
        value,
        wanted,
        Rule.CALM,
        f"calm for {calm_for:.0f} s",
        f"requests up to {value} tokens are admitted again",
        {"calmSeconds": calm_for},
        limited,
    )


def _whole_blocks(length: float, situation: Situation) -> int:
    block = situation.settings.block_size
    return max(block, int(length) // block * block)


def _longest(waits: Iterable[float | None]) -> float | None:
    return max((wait for wait in waits if wait is not None), default=None)
