"""What changed, told to people: history entries, their later outcomes, Events.

In: the limits before and after, and the proposal between them. Out: values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from plimsoll_operator.tuning.bounds import whole_batch
from plimsoll_operator.tuning.evidence import Evidence
from plimsoll_operator.tuning.policy import TuningPolicy
from plimsoll_operator.tuning.situation import Proposal
from plimsoll_operator.tuning.values import (
    LANE,
    WHOLE,
    Change,
    Event,
    Limits,
    Parameter,
    Rule,
    TuningInputs,
)

_EVENTS = {
    (Parameter.MAX_MODEL_LEN, False): "LengthLowered",
    (Parameter.MAX_MODEL_LEN, True): "LengthRestored",
    (Parameter.GPU_MEMORY_UTILIZATION, False): "UtilizationLowered",
    (Parameter.GPU_MEMORY_UTILIZATION, True): "PoolRaised",
    (Parameter.MAX_NUM_SEQS, False): "BatchLowered",
    (Parameter.MAX_NUM_SEQS, True): "BatchRestored",
    (Parameter.MAX_NUM_BATCHED_TOKENS, False): "BatchLowered",
    (Parameter.MAX_NUM_BATCHED_TOKENS, True): "BatchRestored",
    (Parameter.WATERMARK, False): "WatermarkLowered",
    (Parameter.WATERMARK, True): "WatermarkRaised",
    (Parameter.LONG_PROMPT_TOKENS, False): "LaneChanged",
    (Parameter.LONG_PROMPT_TOKENS, True): "LaneChanged",
    (Parameter.LONG_PROMPT_SHARE, False): "LaneNarrowed",
    (Parameter.LONG_PROMPT_SHARE, True): "LaneWidened",
}


def find_changes(
    inputs: TuningInputs, before: Limits, after: Limits, proposal: Proposal | None, revision: int
) -> tuple[Change, ...]:
    """One per limit that moved. A limit that had no value, or lost it, has not moved: an engine
    that finds its own length does so once."""
    first = inputs.state.revision == 0
    if first:
        before = inputs.settings.start
    settings = inputs.settings
    pairs = (
        # A batch that was never moved was the spec's.
        (each, before.value(each) or whole_batch(settings, each), after.value(each))
        for each in Parameter
    )
    return tuple(
        _change(inputs, parameter, old, new, proposal, revision, first)
        for parameter, old, new in pairs
        if old is not None and new is not None and old != new
    )


def _change(
    inputs: TuningInputs,
    parameter: Parameter,
    old: float,
    new: float,
    proposal: Proposal | None,
    revision: int,
    first: bool,
) -> Change:
    if proposal is not None and proposal.parameter is parameter and proposal.value == new:
        rule, reason, expected = proposal.rule, proposal.reason, proposal.expected
        return Change(
            inputs.now, parameter, old, new, rule, reason, expected, revision, proposal.inputs
        )
    mode = inputs.settings.mode
    if proposal is not None and not first and inputs.state.mode is mode:
        reason = f"the cache at the new line holds no more; {proposal.reason}"
        return Change(inputs.now, parameter, old, new, proposal.rule, reason, "", revision)
    if not first and inputs.state.mode is not mode:
        rule, reason = Rule.MODE, f"spec.tuning.mode is {mode} now"
    elif first or inputs.state.basis == inputs.settings.start:
        rule, reason = Rule.LEARNED, "the bounds, or what is known of this model on this device"
    else:
        rule, reason = Rule.SPEC, "the spec changed"
    return Change(inputs.now, parameter, old, new, rule, reason, "", revision)


def advised_changes(
    inputs: TuningInputs, in_force: Limits, target: Limits, proposal: Proposal | None, revision: int
) -> tuple[Change, ...]:
    """What mode Auto would change in this pass, in mode Advise; a limit that holds nowhere yet (the
    lane's) is a change as well."""
    changes = []
    for each in Parameter:
        old = in_force.value(each) or whole_batch(inputs.settings, each)
        new = target.value(each)
        if new is None or old == new:
            continue
        if proposal is not None and proposal.parameter is each and proposal.value == new:
            rule, reason, expected = proposal.rule, proposal.reason, proposal.expected
            figures = proposal.inputs
        elif each in LANE:
            rule, reason, figures = Rule.LANE, "where the tuner starts, whatever the traffic", {}
            expected = "short prompts pass long ones that wait, and fewer requests are preempted"
        else:
            rule, reason, figures = Rule.LEARNED, "the bounds, or what was learned here", {}
            expected = "no engine dies at this value"
        changes.append(
            Change(inputs.now, each, old, new, rule, reason, expected, revision, figures)
        )
    return tuple(changes)


def judge_outcomes(
    history: tuple[Change, ...],
    evidence: Evidence,
    ooms: tuple[Event, ...],
    changes: tuple[Change, ...],
    policy: TuningPolicy,
    now: float,
) -> tuple[Change, ...]:
    """Fills in the outcome of changes that have had their time, or that the next one ends."""

    def judged(change: Change) -> Change:
        if change.outcome:
            return change
        if ooms:
            return replace(change, outcome=f"then {ooms[0].message}")
        if evidence.complete and (changes or now - change.time >= policy.outcome_after):
            return replace(change, outcome=_compare(change, evidence))
        return change

    return tuple(judged(change) for change in history)


def _compare(change: Change, evidence: Evidence) -> str:
    usage = max(signals.usage for signals in evidence.signals)
    waiting = sum(signals.reading.waiting for signals in evidence.signals)
    lows = [
        reading.device_free_low_water_bytes
        for reading in evidence.readings
        if reading.device_free_low_water_bytes is not None
    ]
    figures = [
        _then_and_now("cache", change.inputs.get("kvCacheUsage"), usage, "{:.0%}"),
        _then_and_now("waiting", change.inputs.get("waiting"), waiting, "{:.0f}"),
    ]
    if change.parameter is Parameter.GPU_MEMORY_UTILIZATION and lows:
        before = change.inputs.get("freeLowWaterBytes")
        mib = 1024 * 1024
        then = None if before is None else before / mib
        figures.append(_then_and_now("MiB free", then, min(lows) / mib, "{:.0f}"))
    return ", ".join(figures)


def _then_and_now(name: str, then: float | None, now: float, form: str) -> str:
    after = form.format(now)
    return f"{name} {after}" if then is None else f"{name} {form.format(then)} -> {after}"


def remember(
    history: tuple[Change, ...], changes: tuple[Change, ...], most: int
) -> tuple[Change, ...]:
    """With the new changes. What has to go is the oldest change of the limit with the most of them:
    whether a limit flaps must not be forgotten over the moves of another."""
    kept = [*history, *changes]
    while len(kept) > most:
        counts = Counter(change.parameter for change in kept)
        fullest = max(counts.values())
        kept.remove(next(change for change in kept if counts[change.parameter] == fullest))
    return tuple(kept)


def events_of(changes: Iterable[Change]) -> tuple[Event, ...]:
    """One per decision; the user's own edits need none."""
    return tuple(
        Event(_event_reason(change), f"{describe(change)}: {change.reason}")
        for change in changes
        if change.rule is not Rule.SPEC
    )


def _event_reason(change: Change) -> str:
    assert change.before is not None
    assert change.after is not None
    return _EVENTS[change.parameter, change.after > change.before]


def describe(change: Change) -> str:
    """``maxModelLen 8192 -> 4096``."""
    form = "{:.0f}" if change.parameter in WHOLE else "{:.3g}"
    if change.parameter is Parameter.GPU_MEMORY_UTILIZATION:
        form = "{:.2f}"
    return f"{change.parameter} {form.format(change.before)} -> {form.format(change.after)}"
