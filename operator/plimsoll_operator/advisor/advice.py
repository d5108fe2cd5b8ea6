"""What was advised, and what became of it.

In: the tuner's advice of one pass, the settings that hold, and the advice so far. Out: the advice from
now on. A burst is over when somebody looks, so what was advised stands for a day after it was last
called for, or until the settings are so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from plimsoll_operator.advisor.settings import Current
from plimsoll_operator.tuning.policy import DEFAULT_POLICY
from plimsoll_operator.tuning.values import WHOLE, Change, Parameter, Rule

STANDS_FOR = 24 * 3600.0
KEPT = 20
# What comes again sooner is the same burst (the tuner's gap between reversals).
BURST = DEFAULT_POLICY.reversal_gap


class Outcome(StrEnum):
    FOLLOWED = "Followed"
    EXPIRED = "Expired"


@dataclass(frozen=True)
class Advice:
    """One limit that should be otherwise. ``before`` None: unknown, or vLLM has no such setting.
    ``last`` is when it was last called for anew, ``times`` how often that was; ``called_for`` says
    that it is so now. ``outcome`` None: it stands."""

    parameter: Parameter
    before: float | None
    to: float
    rule: Rule
    reason: str
    expected: str
    since: float
    last: float
    times: int = 1
    called_for: bool = True
    outcome: Outcome | None = None

    @property
    def stands(self) -> bool:
        return self.outcome is None


def follow(
    advice: tuple[Advice, ...], changes: Iterable[Change], current: Current, now: float
) -> tuple[Advice, ...]:
    """``changes`` is what the tuner would do now."""
    called = {(change.parameter, change.rule): change for change in changes}
    kept = []
    for each in advice:
        if not each.stands:
            kept.append(each)
            continue
        change = called.get((each.parameter, each.rule))
        if is_followed(each, current):
            each = replace(each, outcome=Outcome.FOLLOWED, called_for=False)
        elif change is not None:
            called.pop((each.parameter, each.rule))
            each = _again(each, change, current, now)
        elif each.called_for:
            each = replace(each, called_for=False)
        elif now - each.last >= STANDS_FOR:
            each = replace(each, outcome=Outcome.EXPIRED)
        kept.append(each)
    kept += [_new(change, current, now) for change in called.values() if change.after is not None]
    return _bounded(kept)


def is_followed(advice: Advice, current: Current) -> bool:
    """As far or further than advised, from another value than it was advised at."""
    now, before = current.value(advice.parameter), advice.before
    if now is None or now == before:
        return False
    upwards = before is not None and advice.to > before
    return now >= advice.to if upwards else now <= advice.to


def standing(advice: Iterable[Advice]) -> tuple[Advice, ...]:
    """One for each limit, the most careful where several rules have spoken."""
    found: dict[Parameter, Advice] = {}
    for each in advice:
        known = found.get(each.parameter)
        if each.stands and (known is None or each.to < known.to):
            found[each.parameter] = each
    return tuple(found[parameter] for parameter in Parameter if parameter in found)


def flag_of(advice: Advice) -> str:
    """As vLLM, or the gate, is told it."""
    name = {
        Parameter.MAX_MODEL_LEN: "max-model-len",
        Parameter.GPU_MEMORY_UTILIZATION: "gpu-memory-utilization",
        Parameter.MAX_NUM_SEQS: "max-num-seqs",
        Parameter.MAX_NUM_BATCHED_TOKENS: "max-num-batched-tokens",
        Parameter.WATERMARK: "watermark",
        Parameter.LONG_PROMPT_TOKENS: "long-prompt-tokens",
        Parameter.LONG_PROMPT_SHARE: "long-prompt-share",
    }[advice.parameter]
    value = f"{advice.to:.0f}" if advice.parameter in WHOLE else f"{advice.to:g}"
    return f"--{name}={value}"


def _new(change: Change, current: Current, now: float) -> Advice:
    assert change.after is not None
    return Advice(
        parameter=change.parameter,
        before=current.value(change.parameter),
        to=change.after,
        rule=change.rule,
        reason=change.reason,
        expected=change.expected,
        since=now,
        last=now,
    )


def _again(each: Advice, change: Change, current: Current, now: float) -> Advice:
    """The same rule again. What was learned, and the lane's measure, follow the newest word. Of a burst
    the first word counts, since Auto would have moved then and seen another burst from there on; of
    several bursts the most careful one."""
    assert change.after is not None
    called, lasting = replace(each, called_for=True), each.rule in (Rule.LANE, Rule.LEARNED)
    anew = not each.called_for and now - each.last >= BURST
    if anew:
        called = replace(called, last=now, times=each.times + 1)
    if change.after == each.to or not (lasting or (anew and change.after < each.to)):
        return called
    return replace(
        called,
        before=current.value(each.parameter),
        to=change.after,
        reason=change.reason,
        expected=change.expected,
    )


def _bounded(advice: list[Advice]) -> tuple[Advice, ...]:
    """What goes first is over the longest."""
    while len(advice) > KEPT:
        over = [each for each in advice if not each.stands] or advice
        advice.remove(min(over, key=lambda each: each.last))
    return tuple(advice)
