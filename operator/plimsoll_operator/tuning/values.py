"""The values that go into and come out of the tuner.

In: readings of the engines (scrape.py), failures (failures.py) and what the spec allows. Out: a
:class:`TuningDecision`. Lengths are tokens, sizes bytes, times Unix seconds, durations seconds,
utilisations and usages fractions of 1. None means unknown or "leave as it is", never zero.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from plimsoll_operator.spec import TuningMode
from plimsoll_operator.tuning.histogram import EMPTY, Histogram

# Of a histogram of request lengths: upper bounds in tokens with the count up to each, ascending.
LengthCounts = tuple[tuple[float, float], ...]


# The modes in which what the tuner decided is in force.
TUNED = (TuningMode.INITIAL, TuningMode.AUTO)


class UnknownReason(StrEnum):
    """Why nothing is known of a pod; also the reason of the condition MetricsAvailable."""

    UNREACHABLE = "EngineUnreachable"
    TIMED_OUT = "ScrapeTimedOut"
    BAD_STATUS = "ScrapeRefused"
    UNREADABLE = "PageUnreadable"
    METRIC_MISSING = "MetricMissing"
    STALE = "MetricsStale"
    NOT_READY = "PodNotReady"


@dataclass(frozen=True)
class Unknown:
    """Something about a pod is not known. ``metric`` names the metric, when it is about one."""

    reason: UnknownReason
    pod: str
    message: str
    metric: str | None = None


@dataclass(frozen=True)
class EngineReading:
    """One page of one pod, for the served model. Fields ending in ``_total`` are counters.

    A page without usage or waiting is Unknown as a whole. The other fields are None when the page
    does not have them (stock vLLM has no ``plimsoll:`` metric); signals.py says which of those
    the tuner cannot do without.
    """

    pod: str
    at: float
    # Worst of the pod's engines.
    kv_cache_usage: float
    # Sums over the pod's engines.
    waiting: int
    running: int | None = None
    preemptions_total: float | None = None

    # A change means that the engine's process was restarted.
    started_at: float | None = None
    # vllm:iteration_tokens_total_count, the engine's step counter.
    steps_total: float | None = None
    queue_seconds_total: float | None = None
    queued_requests_total: float | None = None
    rejected_over_length_total: float | None = None
    recomputed_tokens_total: float | None = None
    prompt_tokens_total: float | None = None
    generation_tokens_total: float | None = None
    allocation_failures_total: float | None = None

    device_total_bytes: int | None = None
    device_free_bytes: int | None = None
    # Smallest free memory of the last minute.
    device_free_low_water_bytes: int | None = None
    # By class: weights, activations, graphs, runtime, kv_cache.
    planned_bytes: Mapping[str, int] = field(default_factory=dict)
    actual_bytes: Mapping[str, int] = field(default_factory=dict)
    block_size: int | None = None
    usable_blocks: int | None = None
    committed_blocks: int | None = None

    max_model_len_admitted: int | None = None
    max_model_len_ceiling: int | None = None
    largest_prompt_admissible: int | None = None
    gpu_memory_utilization: float | None = None
    # Seconds that the first of the waiting has waited, by its lane.
    short_wait: float | None = None
    long_wait: float | None = None
    limits_revision: int | None = None
    step_heartbeat_age: float | None = None

    # Finished requests by prompt and by output tokens, as the page's histograms have them.
    prompt_lengths: LengthCounts = ()
    output_lengths: LengthCounts = ()


@dataclass(frozen=True)
class Limits:
    """What the tuner moves. None leaves that limit to the engine's flags.

    A request whose prompt has more than ``long_prompt_tokens`` is long; the long together hold at
    most ``long_prompt_share`` of the usable blocks (one may always run alone), and short ones may
    overtake them. ``watermark`` is the share of the blocks that an admission leaves free.
    """

    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    watermark: float | None = None
    long_prompt_tokens: int | None = None
    long_prompt_share: float | None = None

    def value(self, parameter: Parameter) -> float | None:
        found: float | None = getattr(self, FIELDS[parameter])
        return found

    def moved(self, parameter: Parameter, value: float | None) -> Limits:
        """A copy with that limit; tokens and sequences are whole numbers."""
        whole = value is not None and parameter in WHOLE
        limit: Any = int(value or 0) if whole else value
        return replace(self, **{FIELDS[parameter]: limit})

    def only(self, parameters: Collection[Parameter]) -> Limits:
        """Without the limits that are not among ``parameters``."""
        return Limits(**{FIELDS[each]: getattr(self, FIELDS[each]) for each in parameters})


class Parameter(StrEnum):
    """The limits, by their names in the spec and in the limits file."""

    MAX_MODEL_LEN = "maxModelLen"
    GPU_MEMORY_UTILIZATION = "gpuMemoryUtilization"
    MAX_NUM_SEQS = "maxNumSeqs"
    MAX_NUM_BATCHED_TOKENS = "maxNumBatchedTokens"
    WATERMARK = "watermark"
    LONG_PROMPT_TOKENS = "longPromptTokens"
    LONG_PROMPT_SHARE = "longPromptShare"


FIELDS = {
    Parameter.MAX_MODEL_LEN: "max_model_len",
    Parameter.GPU_MEMORY_UTILIZATION: "gpu_memory_utilization",
    Parameter.MAX_NUM_SEQS: "max_num_seqs",
    Parameter.MAX_NUM_BATCHED_TOKENS: "max_num_batched_tokens",
    Parameter.WATERMARK: "watermark",
    Parameter.LONG_PROMPT_TOKENS: "long_prompt_tokens",
    Parameter.LONG_PROMPT_SHARE: "long_prompt_share",
}
WHOLE = frozenset(
    {
        Parameter.MAX_MODEL_LEN,
        Parameter.MAX_NUM_SEQS,
        Parameter.MAX_NUM_BATCHED_TOKENS,
        Parameter.LONG_PROMPT_TOKENS,
    }
)
# What the spec has no word for: the tuner chooses where it starts (lane.py).
LANE = (Parameter.WATERMARK, Parameter.LONG_PROMPT_TOKENS, Parameter.LONG_PROMPT_SHARE)


class OutcomeKind(StrEnum):
    """What an engine answered to SetLimits, or why there is no answer."""

    APPLIED = "Applied"
    DEFERRED = "Deferred"
    REJECTED = "Rejected"
    UNREACHABLE = "Unreachable"
    UNAUTHENTICATED = "Unauthenticated"


@dataclass(frozen=True)
class LimitsOutcome:
    """One pod's answer to one SetLimits; ``effective`` is what holds there now."""

    kind: OutcomeKind
    pod: str
    revision: int
    reason: str = ""
    effective: Limits | None = None


class FailureClass(StrEnum):
    CGROUP_OOM = "CgroupOOM"
    CUDA_OOM_AT_START = "CudaOOMAtStart"
    CUDA_OOM_AT_RUNTIME = "CudaOOMAtRuntime"
    KV_TOO_SMALL_FOR_MAX_LEN = "KVTooSmallForMaxLen"
    MODEL_TOO_LARGE = "ModelTooLarge"
    GPU_BUSY_AT_START = "GPUBusyAtStart"
    GPU_FAULT = "GPUFault"
    COLLECTIVE_FAILURE = "CollectiveFailure"
    MODEL_LOAD_FAILED = "ModelLoadFailed"
    INVALID_CONFIGURATION = "InvalidConfiguration"
    EVICTED = "Evicted"
    IMAGE_ERROR = "ImageError"
    UNSCHEDULABLE = "Unschedulable"
    ENGINE_DEAD = "EngineDead"


OUT_OF_MEMORY = frozenset(
    {
        FailureClass.CGROUP_OOM,
        FailureClass.CUDA_OOM_AT_START,
        FailureClass.CUDA_OOM_AT_RUNTIME,
    }
)


@dataclass(frozen=True)
class Failure:
    """One death of one engine container, or what keeps it from starting.

    ``incident`` is the same in every pass that sees the same death (pod uid and restart count), so
    that nothing is counted or acted upon twice. ``serving`` says whether the engine had been ready
    in that life: None when nobody can tell.
    """

    failure_class: FailureClass
    incident: str
    pod: str
    message: str
    at: float | None = None
    started_at: float | None = None
    exit_code: int | None = None
    serving: bool | None = None
    figures: Mapping[str, int | float | str] = field(default_factory=dict)
    # The flag and the value that would work, when the engine knows.
    suggested_flag: str | None = None
    suggested_value: int | float | str | None = None


class Rule(StrEnum):
    """Why a limit moved; each is documented in docs/tuning.md."""

    SPEC = "spec"
    MODE = "mode"
    LEARNED = "learned"
    LANE = "lane"
    PREEMPTION = "preemption"
    SHORT_DEMAND = "short-demand"
    BALANCE = "balance"
    PRESSURE = "pressure"
    CALM = "calm"
    LOW_HEADROOM = "low-headroom"
    ALLOCATION_FAILURE = "allocation-failure"
    AMPLE_HEADROOM = "ample-headroom"
    REJECTED = "rejected"
    OOM = "oom"
    OOM_AT_START = "oom-at-start"
    KV_TOO_SMALL = "kv-too-small"


@dataclass(frozen=True)
class Change:
    """One move of one limit. ``inputs`` are the figures the rule looked at; ``outcome`` is empty
    until the change has been seen to work or not."""

    time: float
    parameter: Parameter
    before: float | int | None
    after: float | int | None
    rule: Rule
    reason: str
    expected: str
    revision: int
    inputs: Mapping[str, float] = field(default_factory=dict)
    outcome: str = ""


@dataclass(frozen=True)
class Event:
    """To be written once, as a Kubernetes Event on the LLMDeployment."""

    reason: str
    message: str
    warning: bool = False


class Status(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


@dataclass(frozen=True)
class Verdict:
    """One condition: MetricsAvailable, TuningActive, TuningLimited or OOMDetected."""

    type: str
    status: Status
    reason: str
    message: str


@dataclass(frozen=True)
class Settings:
    """What the spec says, with defaults filled in (settings.py makes it).

    Without ``tunes_length`` the length is never touched. ``ceiling`` None: the engine finds the
    largest length that fits; ``floor`` None: the spec guarantees none.
    """

    mode: TuningMode
    start: Limits
    min_utilization: float
    max_utilization: float
    tunes_length: bool
    floor: int | None
    ceiling: int | None
    block_size: int
    # On CPU the device's memory is the container's memory limit: a cgroup OOM is a device OOM.
    on_cpu: bool
    # The container's memory limit as the spec has it, for messages.
    memory_limit: str | None
    time_to_first_token: float
    scrape_interval: float
    # metadata.generation: a new one is a new chance for what had been given up.
    generation: int
    # The spec's own; None where it is not known, and then they never move.
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    # Limits that a flag of the user's fixes: the tuner never sends them.
    pinned: frozenset[Parameter] = frozenset()
    # What this runtime can move while it serves; any other limit costs a restart of every pod.
    live: frozenset[Parameter] = frozenset(Parameter)
    max_restarts_per_day: int = 4
    # Seconds that a stopping pod may take to finish its requests.
    drain: float = 60.0

    def may_move(self, parameter: Parameter) -> bool:
        return parameter in self.live and parameter not in self.pinned


@dataclass(frozen=True)
class Blocked:
    """A utilisation at which an engine died; nothing at or above it is tried again for a while.
    ``retreat`` is where the tuner went from there."""

    utilization: float
    retreat: float
    at: float
    failure_class: FailureClass
    count: int = 1


@dataclass(frozen=True)
class Peaks:
    """Decaying histograms, one sample per five-minute window with traffic in it; lengths have one
    per request. Only whole windows enter, so that a restarted operator decides from the same.

    ``demand``: the most that running and waiting requests would have held, ``short``: the most that
    short prompts held while nobody waited; both as shares of the usable cache. ``overrun``: the
    device's memory in use above the line, as a share of the device. Lengths are tokens.
    """

    demand: Histogram = EMPTY
    short: Histogram = EMPTY
    overrun: Histogram = EMPTY
    prompts: Histogram = EMPTY
    outputs: Histogram = EMPTY


NO_PEAKS = Peaks()


@dataclass(frozen=True)
class Gathered:
    """What the window that is open has seen so far; shares as in :class:`Peaks`."""

    since: float
    demand: float | None = None
    # Without the queue, on pages where nobody waited.
    unqueued: float | None = None
    overrun: float | None = None
    prompts: LengthCounts = ()
    outputs: LengthCounts = ()


@dataclass(frozen=True)
class Learned:
    """The content of a MemoryProfile: outlives the deployment that learned it."""

    blocked: tuple[Blocked, ...] = ()
    # Highest utilisation that carried a nearly full pool with its headroom intact.
    last_known_good: float | None = None
    last_oom_at: float | None = None
    # Largest share of the device's memory seen in use above the line, and when.
    overrun: float | None = None
    overrun_at: float | None = None
    peaks: Peaks = NO_PEAKS


@dataclass(frozen=True)
class GiveUp:
    """Restarting will not help: Stalled, with the figures that would work, until the spec changes."""

    reason: str
    message: str


@dataclass(frozen=True)
class OOMRecord:
    """status.oom. ``host_memory``: the last one was not the tuner's to answer, because the memory
    that ran out is not the one that the limits divide."""

    total: int = 0
    last: Failure | None = None
    host_memory: bool = False


@dataclass(frozen=True)
class TuningState:
    """What the tuner carries from pass to pass. record.py writes it into status, except the last
    block, which is observed anew after a restart of the operator.

    ``tuned`` is what the tuner itself decided (None: the spec's value holds); ``limits`` is what
    was in force after the last pass.
    """

    tuned: Limits = Limits()
    limits: Limits = Limits()
    revision: int = 0
    revised_at: float | None = None
    # The spec's values that ``limits`` were derived from; a difference is a change by the user.
    basis: Limits | None = None
    mode: TuningMode | None = None
    generation: int | None = None
    history: tuple[Change, ...] = ()
    # Incidents already acted upon, newest last.
    handled: tuple[str, ...] = ()
    oom: OOMRecord = OOMRecord()
    # Failed starts in a row, by pod.
    start_failures: Mapping[str, int] = field(default_factory=dict)
    metrics_available: bool = True

    windows: Mapping[str, tuple[EngineReading, ...]] = field(default_factory=dict)
    pressed_since: float | None = None
    calm_since: float | None = None
    slack_since: float | None = None
    unknown_since: float | None = None
    gathered: Gathered | None = None


@dataclass(frozen=True)
class TuningInputs:
    """``engines`` has an entry for every pod that should serve now (one that is starting or being
    deleted is left out); ``outcomes`` are the answers to the last SetLimits, by pod."""

    settings: Settings
    engines: Mapping[str, EngineReading | Unknown]
    failures: tuple[Failure, ...]
    state: TuningState
    learned: Learned
    now: float
    outcomes: Mapping[str, LimitsOutcome] = field(default_factory=dict)


class Source(StrEnum):
    """Where the limits in force come from (status.effective.source)."""

    SPEC = "Spec"
    TUNED = "Tuned"
    LEARNED = "Learned"
    PINNED = "Pinned"


@dataclass(frozen=True)
class TuningDecision:
    """``limits`` are to be in force at ``revision`` on every pod. ``target`` is what the tuner
    would do (it differs from ``limits`` in mode Advise, and then ``advice`` says why, limit by limit),
    ``uncapped`` what it would do without bounds. ``unconfirmed`` are pods that can be read and do not have ``limits`` yet. ``state`` and ``learned`` go into the next pass; ``learned`` is written to the
    MemoryProfile when it differs from the one that came in."""

    limits: Limits
    revision: int
    source: Source
    target: Limits
    lower_bound: Limits
    upper_bound: Limits
    uncapped: Limits
    reason: str
    changes: tuple[Change, ...]
    events: tuple[Event, ...]
    verdicts: tuple[Verdict, ...]
    state: TuningState
    learned: Learned
    give_up: GiveUp | None = None
    unconfirmed: tuple[str, ...] = ()
    advice: tuple[Change, ...] = ()
