"""One decision of the tuner.

In: :class:`TuningInputs`. Out: a :class:`TuningDecision`. Deterministic: the same inputs give the
same decision, and the state that comes out goes into the next pass.
"""

from __future__ import annotations

from dataclasses import replace

from plimsoll_operator.spec import TuningMode
from plimsoll_operator.tuning import verdicts
from plimsoll_operator.tuning.bounds import (
    Bounds,
    find_bounds,
    limits_in_force,
    start_utilization,
    whole_batch,
)
from plimsoll_operator.tuning.evidence import gather, is_reportable, unconfirmed
from plimsoll_operator.tuning.history import (
    advised_changes,
    events_of,
    find_changes,
    judge_outcomes,
    remember,
)
from plimsoll_operator.tuning.lane import start_lane
from plimsoll_operator.tuning.lessons import learn, observe
from plimsoll_operator.tuning.peaks import gather_peaks
from plimsoll_operator.tuning.policy import DEFAULT_POLICY, TuningPolicy
from plimsoll_operator.tuning.rules import first_move
from plimsoll_operator.tuning.signals import Window
from plimsoll_operator.tuning.situation import Proposal, Situation
from plimsoll_operator.tuning.values import (
    LANE,
    TUNED,
    Event,
    Learned,
    Limits,
    OutcomeKind,
    Parameter,
    Rule,
    Source,
    TuningDecision,
    TuningInputs,
    TuningState,
)


def decide(inputs: TuningInputs, policy: TuningPolicy = DEFAULT_POLICY) -> TuningDecision:
    """What should be in force now, and why."""
    settings, now, before = inputs.settings, inputs.now, inputs.state

    # Step 1: what the pages say, together with those before them.
    evidence = gather(inputs, policy)

    # Step 2: where the limits stand, after the user's changes of spec and mode.
    learned = inputs.learned
    bounds = find_bounds(settings, evidence.latest, learned, policy, now)
    state = _follow_spec(inputs, bounds, policy)
    limits = limits_in_force(settings, state.tuned, state.limits, bounds)
    assert limits.gpu_memory_utilization is not None  # the spec's default at least

    # Step 3: what deaths teach. This alone needs no metrics: a dead engine has none.
    lesson = learn(replace(inputs, state=state), bounds, limits.gpu_memory_utilization, policy)
    state, learned = lesson.state, observe(lesson.learned, evidence, state.history, policy, now)
    gathered, peaks = gather_peaks(inputs, evidence, limits, policy)
    learned = replace(learned, peaks=peaks)
    bounds = find_bounds(settings, evidence.latest, learned, policy, now)

    # Step 4: what the rules propose, once everything is known and the last change has settled.
    waiting_for = unconfirmed(inputs, evidence)
    proposal = lesson.proposal
    held_back: tuple[Proposal, ...] = ()
    # The user's change is the one in flight: what was calm before it says nothing about it.
    edited = before.revision > 0 and limits != before.limits
    if (
        proposal is None
        and evidence.complete
        and not edited
        and _may_move(inputs, waiting_for, policy)
    ):
        situation = Situation(
            settings=settings,
            policy=policy,
            signals=evidence.signals,
            bounds=bounds,
            limits=limits,
            learned=learned,
            history=state.history,
            revision=state.revision,
            outcomes=inputs.outcomes,
            pressed_for=evidence.lasting(evidence.pressed_since),
            calm_for=evidence.lasting(evidence.calm_since),
            slack_for=evidence.lasting(evidence.slack_since),
            now=now,
        )
        proposal, held_back = first_move(situation)
    elif proposal is not None and proposal.limited is not None:
        held_back = (proposal,)

    # Step 5: only mode Auto carries a proposal out.
    if settings.mode is TuningMode.AUTO and proposal is not None:
        tuned = state.tuned.moved(proposal.parameter, proposal.value)
        tuned = _with_length_that_fits(tuned, limits, bounds)
        state = replace(state, tuned=_without_needless(tuned, inputs, bounds))
    in_force = limits_in_force(settings, state.tuned, state.limits, bounds)
    target = in_force
    if settings.mode is TuningMode.ADVISE:
        target = _advice(inputs, proposal, learned, bounds, policy)

    # Step 6: the difference to the last pass, as values for history, Events and conditions.
    reported = max((r.limits_revision or 0 for r in evidence.readings), default=0)
    moved = in_force != before.limits or reported > before.revision
    revision = max(before.revision, reported) + 1 if moved else before.revision
    changes = find_changes(inputs, state.limits, in_force, proposal, revision)
    history = judge_outcomes(state.history, evidence, lesson.events, changes, policy, now)
    missing = bool(evidence.unknowns) and is_reportable(evidence, settings.scrape_interval, now)
    available = verdicts.metrics_available(evidence.unknowns if missing else (), inputs.engines)
    events = [*lesson.events, *events_of(changes)]
    if missing and before.metrics_available:
        events.append(Event("MetricsUnavailable", available.message, warning=True))
    late = tuple(
        pod
        for pod in waiting_for
        if now - _could_confirm_at(evidence.windows[pod], before) > policy.confirm_timeout
    )
    # What moves in this pass nobody has yet.
    pending = tuple(reading.pod for reading in evidence.readings) if moved else waiting_for
    state = replace(
        state,
        limits=in_force,
        revision=revision,
        revised_at=now if moved else before.revised_at,
        basis=settings.start,
        mode=settings.mode,
        generation=settings.generation,
        history=remember(history, changes, policy.history_length),
        metrics_available=not missing if inputs.engines else before.metrics_available,
        windows=evidence.windows,
        pressed_since=evidence.pressed_since,
        calm_since=None if edited else evidence.calm_since,
        slack_since=None if edited else evidence.slack_since,
        unknown_since=evidence.unknown_since,
        gathered=gathered,
    )
    return TuningDecision(
        limits=in_force,
        revision=revision,
        source=_source(state),
        target=target,
        lower_bound=Limits(bounds.floor, bounds.lowest),
        upper_bound=Limits(bounds.top, bounds.highest),
        uncapped=_uncapped(in_force, proposal, held_back),
        reason=_reason(state),
        changes=changes,
        events=tuple(events),
        verdicts=(
            available,
            verdicts.tuning_active(settings, available, inputs.outcomes, pending, late),
            verdicts.tuning_limited(
                tuple(found.limited or "" for found in held_back),
                verdicts.needs_restart(settings, learned, policy, now),
            ),
            verdicts.oom_detected(state.oom, settings, policy, now),
        ),
        state=state,
        learned=learned,
        give_up=lesson.give_up,
        unconfirmed=pending,
        advice=()
        if settings.mode is not TuningMode.ADVISE
        else advised_changes(inputs, in_force, target, proposal, revision),
    )


def _follow_spec(inputs: TuningInputs, bounds: Bounds, policy: TuningPolicy) -> TuningState:
    """A value that the user changed is the new start, and the new top of what was tuned. Off and
    Advise forget what was tuned. Where it starts, a profile may know better than the spec; in mode
    Initial it starts anew whenever no engine serves."""
    state, settings = inputs.state, inputs.settings
    if settings.mode in (TuningMode.OFF, TuningMode.ADVISE):
        return replace(state, tuned=Limits())
    start, basis = settings.start, state.basis or settings.start
    length, utilization = state.tuned.max_model_len, state.tuned.gpu_memory_utilization
    if not settings.tunes_length:
        length = None
    elif None not in (length, start.max_model_len) and basis.max_model_len != start.max_model_len:
        length = min(length or 0, start.max_model_len or 0)
    # Hold keeps what was tuned; where nothing was, Auto has yet to start.
    held = state.mode is TuningMode.HOLD and utilization is not None
    starts = state.mode is not TuningMode.AUTO and not held
    if basis.gpu_memory_utilization != start.gpu_memory_utilization:
        starts, utilization = True, None
    if settings.mode is TuningMode.INITIAL:
        starts = (starts and state.mode is not TuningMode.INITIAL) or not inputs.engines
    tuned = state.tuned.moved(Parameter.MAX_MODEL_LEN, length)
    if settings.mode in TUNED:
        tuned = start_lane(settings, tuned, bounds, policy)
        known = start_utilization(settings, inputs.learned, policy, inputs.now)
        if starts and known != start.gpu_memory_utilization:
            utilization = known
        if utilization is not None:
            utilization = bounds.clamp_utilization(utilization)
    return replace(state, tuned=tuned.moved(Parameter.GPU_MEMORY_UTILIZATION, utilization))


def _may_move(inputs: TuningInputs, waiting_for: tuple[str, ...], policy: TuningPolicy) -> bool:
    """One change in flight, and a pause after each, the first limits included; a refusal may be
    answered at once."""
    if any(outcome.kind is OutcomeKind.REJECTED for outcome in inputs.outcomes.values()):
        return True
    revised_at = inputs.state.revised_at
    if waiting_for or revised_at is None:
        return False
    return inputs.now - revised_at >= policy.settle_scrapes * inputs.settings.scrape_interval


def _could_confirm_at(window: Window, state: TuningState) -> float:
    """The limits of long ago are news to an engine that has just started."""
    return max(window[0].at, state.revised_at or 0.0)


def _uncapped(
    in_force: Limits, proposal: Proposal | None, held_back: tuple[Proposal, ...]
) -> Limits:
    """What would be in force if no bound held it back."""
    wanted = in_force
    for found in (*held_back, *(() if proposal is None else (proposal,))):
        wanted = wanted.moved(found.parameter, found.uncapped)
    return wanted


def _with_length_that_fits(tuned: Limits, limits: Limits, bounds: Bounds) -> Limits:
    """A line that was lowered at once, after an OOM, takes the length with it, down to the floor."""
    utilization = tuned.gpu_memory_utilization
    length = tuned.max_model_len or limits.max_model_len or bounds.top
    if utilization is None or bounds.floor is None or length is None:
        return tuned
    longest = bounds.longest_at(utilization)
    if longest is None or longest >= length:
        return tuned
    return replace(tuned, max_model_len=max(bounds.floor, longest))


def _without_needless(tuned: Limits, inputs: TuningInputs, bounds: Bounds) -> Limits:
    """A length back at the top, or a batch that is whole again, is the spec's."""
    for parameter in (Parameter.MAX_NUM_SEQS, Parameter.MAX_NUM_BATCHED_TOKENS):
        if tuned.value(parameter) == whole_batch(inputs.settings, parameter):
            tuned = tuned.moved(parameter, None)
    start = inputs.settings.start.max_model_len
    length, top = tuned.max_model_len, bounds.top
    if length is None or top is None or length < top or (start is not None and start < top):
        return tuned
    return replace(tuned, max_model_len=None)


def _advice(
    inputs: TuningInputs,
    proposal: Proposal | None,
    learned: Learned,
    bounds: Bounds,
    policy: TuningPolicy,
) -> Limits:
    """What mode Auto would put in force in this pass."""
    settings = replace(inputs.settings, mode=TuningMode.AUTO)
    utilization = start_utilization(settings, learned, policy, inputs.now)
    tuned = Limits(gpu_memory_utilization=bounds.clamp_utilization(utilization))
    tuned = start_lane(settings, tuned, bounds, policy)
    if proposal is not None:
        tuned = tuned.moved(proposal.parameter, proposal.value)
    return limits_in_force(settings, tuned, inputs.state.limits, bounds)


def _source(state: TuningState) -> Source:
    if state.mode is TuningMode.HOLD:
        return Source.PINNED
    untuned = all(state.tuned.value(each) is None for each in Parameter if each not in LANE)
    if untuned:
        # A lane is where the tuner starts: it is no change of anything that the spec says.
        return Source.SPEC
    utilizations = [c for c in state.history if c.parameter is Parameter.GPU_MEMORY_UTILIZATION]
    learned = bool(utilizations) and utilizations[-1].rule is Rule.LEARNED
    return Source.LEARNED if learned and state.tuned.max_model_len is None else Source.TUNED


def _reason(state: TuningState) -> str:
    """The newest change's; it stays the same until the next one."""
    if not state.history:
        return "the spec's values are in force"
    return f"{state.history[-1].rule}: {state.history[-1].reason}"
