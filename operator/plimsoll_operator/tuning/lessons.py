"""What deaths teach: which utilisation to leave, where to go, when to stop trying.

In: failures, what was known, the bounds. Out: a :class:`Lesson`. Each incident counts once. An OOM
of the memory that the limits divide lowers the line and blocks the value that died; a cache too
small for the length raises it; everything else (a busy or faulty device, a model that cannot be
loaded, host memory while weights are read) teaches the limits nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from plimsoll_operator.spec import TuningMode
from plimsoll_operator.tuning.bounds import Bounds, is_fresh, round_down, round_up
from plimsoll_operator.tuning.evidence import Evidence
from plimsoll_operator.tuning.policy import TuningPolicy
from plimsoll_operator.tuning.situation import Proposal
from plimsoll_operator.tuning.values import (
    OUT_OF_MEMORY,
    Blocked,
    Change,
    Event,
    Failure,
    FailureClass,
    GiveUp,
    Learned,
    OOMRecord,
    Parameter,
    Rule,
    TuningInputs,
    TuningState,
)

MAX_HANDLED = 32

_START_FAILURES = {
    FailureClass.CUDA_OOM_AT_START,
    FailureClass.KV_TOO_SMALL_FOR_MAX_LEN,
    FailureClass.MODEL_TOO_LARGE,
    FailureClass.MODEL_LOAD_FAILED,
    FailureClass.INVALID_CONFIGURATION,
}
# The same start cannot end otherwise.
_CERTAIN = {FailureClass.INVALID_CONFIGURATION, FailureClass.MODEL_TOO_LARGE}


@dataclass(frozen=True)
class Lesson:
    """``proposal`` is the one move of the memory line that all new failures together ask for."""

    state: TuningState
    learned: Learned
    proposal: Proposal | None
    events: tuple[Event, ...]
    give_up: GiveUp | None


def learn(inputs: TuningInputs, bounds: Bounds, utilization: float, policy: TuningPolicy) -> Lesson:
    """``utilization`` is the line in force."""
    state, learned, events = inputs.state, inputs.learned, []
    starts = {
        pod: count
        for pod, count in _same_spec_starts(inputs).items()
        # A pod that can be read has started.
        if pod not in inputs.engines
    }
    oom, handled = state.oom, state.handled
    down: Proposal | None = None
    up: Proposal | None = None
    for failure in sorted(inputs.failures, key=lambda f: (f.at or 0.0, f.incident)):
        if failure.incident in handled:
            continue
        handled = (*handled, failure.incident)[-MAX_HANDLED:]
        failed_start = is_failed_start(failure, inputs)
        if failed_start and failure.pod not in inputs.engines:
            starts[failure.pod] = starts.get(failure.pod, 0) + 1
        ours = _is_of_divided_memory(failure, inputs)
        if failure.failure_class in OUT_OF_MEMORY:
            oom = OOMRecord(oom.total + 1, failure, host_memory=not ours)
            events.append(Event("OOM", f"{failure.pod}: {failure.message}", warning=True))
        if ours:
            died, total = _at_death(failure, inputs, utilization)
            wanted = _retreat(died, total, policy)
            # The floor is guaranteed; a length above it goes down with the line.
            retreat = bounds.lower_utilization(wanted, died, bounds.floor or bounds.top)
            death = Blocked(died, retreat, failure.at or inputs.now, failure.failure_class)
            learned = _remember(learned, death, policy)
            if down is None or retreat < down.value:
                down = _step_down(failure, failed_start, died, retreat, wanted)
        elif failure.failure_class is FailureClass.KV_TOO_SMALL_FOR_MAX_LEN:
            up = _step_up(failure, bounds, utilization, policy)
    if down is not None and down.value >= utilization:
        down = None
    state = replace(state, oom=oom, handled=handled, start_failures=starts)
    # A line that just killed an engine is not raised for another one's sake.
    proposal = down or (up if up is not None and up.value > utilization else None)
    give_up = _give_up(inputs, state, proposal, policy)
    return Lesson(state, learned, proposal, tuple(events), give_up)


def is_failed_start(failure: Failure, inputs: TuningInputs) -> bool:
    """The engine had not served in that life."""
    if failure.failure_class is FailureClass.CGROUP_OOM:
        return not _was_serving(failure, inputs)
    return failure.failure_class in _START_FAILURES


def _same_spec_starts(inputs: TuningInputs) -> Mapping[str, int]:
    same = inputs.state.generation in (None, inputs.settings.generation)
    return inputs.state.start_failures if same else {}


def _was_serving(failure: Failure, inputs: TuningInputs) -> bool:
    """The engine's own word, or a page of that life; without either: no."""
    if failure.serving is not None:
        return failure.serving
    if failure.at is None:
        return False
    born = failure.started_at or 0.0
    # The kubelet's times are whole seconds.
    return any(
        born - 1 <= page.at <= failure.at + 1 for page in inputs.state.windows.get(failure.pod, ())
    )


def _is_of_divided_memory(failure: Failure, inputs: TuningInputs) -> bool:
    """Whether the memory that ran out is the one that gpu_memory_utilization divides: device memory,
    and on CPU the container's while serving. The container's while weights are read is not."""
    if failure.failure_class is FailureClass.CGROUP_OOM:
        return inputs.settings.on_cpu and _was_serving(failure, inputs)
    return failure.failure_class in OUT_OF_MEMORY


def _at_death(
    failure: Failure, inputs: TuningInputs, utilization: float
) -> tuple[float, int | None]:
    """The line that the dead engine had, and its device's memory in bytes when known."""
    window = inputs.state.windows.get(failure.pod, ())
    if not window:
        return utilization, None
    last = window[-1]
    if failure.at is not None and last.at > failure.at + 1:
        # The window has begun anew with the next life.
        return utilization, last.device_total_bytes
    line = last.gpu_memory_utilization
    return utilization if line is None else line, last.device_total_bytes


def _retreat(died: float, total: int | None, policy: TuningPolicy) -> float:
    """The headroom grows by 20 % or 100 MB, and the line moves by at least one step."""
    grown = policy.oom_headroom_growth * (1 - died)
    absolute = policy.oom_headroom_bytes / total if total else 0.0
    return round_down(died - max(policy.utilization_step, grown, absolute))


def _remember(learned: Learned, death: Blocked, policy: TuningPolicy) -> Learned:
    """One entry per utilisation; what was known as good and died is not good."""
    kept = [b for b in learned.blocked if death.at - b.at < policy.blocked_twice]
    same = [b for b in kept if round(b.utilization, 2) == round(death.utilization, 2)]
    others = tuple(b for b in kept if b not in same)
    merged = replace(
        death,
        count=1 + sum(b.count for b in same),
        retreat=min([death.retreat, *(b.retreat for b in same)]),
    )
    good = learned.last_known_good
    return replace(
        learned,
        blocked=tuple(sorted((*others, merged), key=lambda b: b.utilization)),
        last_oom_at=max(death.at, learned.last_oom_at or death.at),
        last_known_good=None if good is not None and good >= death.utilization else good,
    )


def observe(
    learned: Learned,
    evidence: Evidence,
    history: tuple[Change, ...],
    policy: TuningPolicy,
    now: float,
) -> Learned:
    """What good days teach: the highest line that carried a full cache with its headroom left, and
    how far real use went above the line. Not while the low-water mark still covers another line."""
    moved = [c.time for c in history if c.parameter is Parameter.GPU_MEMORY_UTILIZATION]
    if now - max(moved, default=float("-inf")) < policy.memory_settle:
        return learned
    for page in evidence.readings:
        line, total = page.gpu_memory_utilization, page.device_total_bytes
        low = page.device_free_low_water_bytes
        if line is None or not total or low is None:
            continue
        full = page.kv_cache_usage >= policy.pressure_usage
        known_good = learned.last_known_good or 0.0
        if full and low >= policy.headroom(total) and line > known_good:
            learned = replace(learned, last_known_good=line)
        over = round_up((total - low) / total - line)
        known = learned.overrun if is_fresh(learned.overrun_at, policy, now) else None
        if over > (known or 0.0):
            learned = replace(learned, overrun=over, overrun_at=now)
    return learned


def _step_down(
    failure: Failure, failed_start: bool, died: float, retreat: float, wanted: float
) -> Proposal:
    return Proposal(
        Parameter.GPU_MEMORY_UTILIZATION,
        retreat,
        wanted,
        Rule.OOM_AT_START if failed_start else Rule.OOM,
        f"{failure.failure_class} at {died:.2f}, {failure.pod}: {failure.message}",
        "the next peak of this size fits",
        {"died": died},
        "the spec's minimum or the cache's needs allow no more" if retreat > wanted else None,
    )


def _step_up(
    failure: Failure, bounds: Bounds, utilization: float, policy: TuningPolicy
) -> Proposal:
    """To what the engine says it needs, else by one step."""
    needed = failure.figures.get("gpu_memory_utilization_needed")
    wanted = round_down(utilization + policy.utilization_step)
    if isinstance(needed, int | float):
        wanted = max(wanted, round_up(needed))
    return Proposal(
        Parameter.GPU_MEMORY_UTILIZATION,
        bounds.raise_utilization(wanted, utilization),
        wanted,
        Rule.KV_TOO_SMALL,
        f"{failure.pod}: {failure.message}",
        "the cache holds one request of full length",
    )


def _give_up(
    inputs: TuningInputs, state: TuningState, proposal: Proposal | None, policy: TuningPolicy
) -> GiveUp | None:
    """Not while there is still a move to try. Whether the template is given up for it is not
    decided here: it may serve in another pod (stall.may_give_up)."""
    for failure in sorted(inputs.failures, key=lambda f: f.incident):
        if not is_failed_start(failure, inputs):
            continue
        attempts, failure_class = state.start_failures.get(failure.pod, 0), failure.failure_class
        tries = 1 if failure_class in _CERTAIN else policy.start_attempts
        if failure_class is FailureClass.KV_TOO_SMALL_FOR_MAX_LEN and not (
            proposal is not None and inputs.settings.mode is TuningMode.AUTO
        ):
            # Nothing in the bounds can make the cache larger.
            tries = 1 if not _pending_raise(inputs) else policy.start_attempts
        if attempts >= tries:
            return GiveUp(failure_class.value, _explain(failure, inputs, attempts))
    return None


def _pending_raise(inputs: TuningInputs) -> bool:
    """The newest change was made for this failure and has not been tried yet."""
    history = inputs.state.history
    return bool(history) and history[-1].rule is Rule.KV_TOO_SMALL and not history[-1].outcome


def _explain(failure: Failure, inputs: TuningInputs, attempts: int) -> str:
    tried = f" ({attempts} failed starts)" if attempts > 1 else ""
    message = f"pod {failure.pod}: {failure.message}{tried}"
    if failure.suggested_value is not None:
        flag = (failure.suggested_flag or "").lstrip("-")
        return f"{message}; {flag} {failure.suggested_value} would work"
    if failure.failure_class is FailureClass.CGROUP_OOM:
        return f"{message}; raise spec.resources.limits.memory ({inputs.settings.memory_limit})"
    seqs, vocabulary = failure.figures.get("max_num_seqs"), failure.figures.get("vocab_size")
    if isinstance(seqs, int) and isinstance(vocabulary, int):
        needed = seqs * vocabulary * 4
        return (
            f"{message}; logits of {seqs} sequences by {vocabulary} words need {needed} bytes: "
            "lower spec.engine.maxNumSeqs or spec.engine.gpuMemoryUtilization"
        )
    if failure.failure_class is FailureClass.CUDA_OOM_AT_START:
        return f"{message}; lower spec.engine.gpuMemoryUtilization or spec.engine.maxNumSeqs"
    return message
