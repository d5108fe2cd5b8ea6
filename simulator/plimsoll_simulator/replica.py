"""One engine: the real scheduler and block pool on a simulated device.

In: requests, limits, the time. Out: steps with their durations, finished requests, deaths. Knows
neither clients nor the policy that moves its limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache

from plimsoll_engine.blocks import BlockPool
from plimsoll_engine.sampling_params import Request, SamplingParams
from plimsoll_engine.scheduler import ScheduledStep, Scheduler, SchedulerLimits
from plimsoll_engine.sequence import Sequence, SequenceState
from plimsoll_simulator.foresight import PastOutputs, PeakScheduler, know
from plimsoll_simulator.hardware import BLOCK_SIZE, Hardware, Model, pool_blocks
from plimsoll_simulator.memory_model import DeviceMemory
from plimsoll_simulator.records import RequestRecord
from plimsoll_simulator.step_time import Prefill, StepTime
from plimsoll_simulator.workload import SimulatedRequest


class Admission(Enum):
    """What must fit for a request to enter: its known tokens, or the peak of all that run then, as
    past outputs tell it, or as it will be."""

    PROMPT = "prompt"
    PAST_OUTPUTS = "past outputs"
    TRUE_OUTPUTS = "true outputs"


@dataclass(frozen=True)
class EngineSettings:
    """Flags at start. ``max_model_len`` None: the model's native length. ``fits_length``: the
    longest up to it that fits the cache (vLLM's ``--max-model-len auto``)."""

    utilization: float
    max_model_len: int | None = None
    fits_length: bool = False
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    watermark: float = 0.0
    long_prompt_tokens: int | None = None
    long_prompt_share: float = 1.0
    long_queue_share: float | None = None
    # Blocks of the cache whatever the utilization (vLLM's flag of this name).
    num_gpu_blocks_override: int | None = None
    prefix_caching: bool = False
    admission: Admission = Admission.PROMPT

    @property
    def scheduler_limits(self) -> SchedulerLimits:
        return SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            watermark=self.watermark,
            long_prompt_tokens=self.long_prompt_tokens,
            long_prompt_share=self.long_prompt_share,
            long_queue_share=self.long_queue_share,
        )


class DoesNotStart(Exception):
    """The cache is too small for one request of full length: vLLM refuses to start."""


class ReplicaState(Enum):
    SERVING = "serving"
    DRAINING = "draining"
    DOWN = "down"


@dataclass
class Counters:
    """Of one life, as the metrics page has them."""

    steps: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    computed_tokens: int = 0
    queue_seconds: float = 0.0
    queued_requests: int = 0
    over_length: int = 0
    busy_seconds: float = 0.0


@dataclass(slots=True)
class Step:
    """A step under way. ``answering`` get their first token by it, ``ending`` their last; ``beyond``
    bytes are its activations above the reserve."""

    scheduled: ScheduledStep
    tokens: int
    sampled: dict[str, int]
    answering: list[Sequence]
    ending: list[Sequence]
    duration: float
    beyond: float


@dataclass(frozen=True)
class Sizes:
    """Blocks and length of a start with given settings."""

    blocks: int
    length: int


def fit(hardware: Hardware, model: Model, settings: EngineSettings) -> Sizes:
    """Raises DoesNotStart."""
    blocks = settings.num_gpu_blocks_override
    if blocks is None:
        blocks = pool_blocks(hardware, model, settings.utilization)
    wanted = settings.max_model_len or model.native_length
    holds = blocks * BLOCK_SIZE
    if settings.fits_length:
        wanted = min(wanted, holds)
    if not blocks or holds < wanted:
        raise DoesNotStart(
            f"the cache holds {holds} tokens at utilization {settings.utilization:g}, one request "
            f"of {wanted} needs more"
        )
    return Sizes(blocks, wanted)


class Replica:
    """One device and the engine on it, over all its lives. ``live`` has the requests in flight by
    the id of the attempt; ``admitted_length`` and the ``set_`` methods are what moves while it
    serves."""

    def __init__(
        self,
        name: str,
        hardware: Hardware,
        model: Model,
        step_time: StepTime,
        memory: DeviceMemory,
        settings: EngineSettings,
    ) -> None:
        self.name = name
        self.hardware = hardware
        self.model = model
        self.memory = memory
        self._step_time = step_time
        self.start(settings, 0.0)

    def start(self, settings: EngineSettings, now: float) -> None:
        """A new life. Raises DoesNotStart."""
        sizes = fit(self.hardware, self.model, settings)
        self.settings = settings
        self.planned_blocks = sizes.blocks
        self.ceiling = sizes.length
        self.admitted_length = sizes.length
        self.utilization = settings.utilization
        self.pool = BlockPool(sizes.blocks)
        self._past_outputs = PastOutputs()
        self.scheduler = self._build_scheduler(settings)
        self.memory.start(now, settings.max_num_batched_tokens)
        self.state = ReplicaState.SERVING
        self.started_at = now
        self.counters = Counters()
        self.revision = 0
        self.live: dict[str, RequestRecord] = {}
        self._queued_at: dict[str, float] = {}
        self.step: Step | None = None
        self.finished_lengths: list[tuple[int, int]] = []

    @property
    def committed(self) -> int:
        return self.pool.committed

    @property
    def outstanding(self) -> int:
        return len(self.live)

    def admits(self, total_tokens: int) -> bool:
        usable = self.pool.usable * BLOCK_SIZE
        return total_tokens <= min(self.admitted_length, usable)

    def may_wait(self, prompt_tokens: int) -> bool:
        """Whether the engine's queue of long prompts has a place."""
        queue = self.scheduler.long_queue
        return queue is None or queue.has_place_for((prompt_tokens,))

    def add(self, record: RequestRecord, now: float) -> None:
        """The caller has asked ``admits`` and ``may_wait``."""
        request = record.request
        name = f"{request.number}-{record.attempts}"
        params = _params(request.output_tokens, request.prompt_logprobs)
        self.scheduler.add(Request(name, self._prompt(request), params, now))
        self.memory.see_prompt(request.input_tokens)
        record.first_token = None
        self.live[name] = record
        self._queued_at[name] = now

    def begin_step(self, now: float) -> Step | None:
        """None: there is nothing to compute, or nothing that may enter."""
        scheduled = self.scheduler.schedule()
        self._note_preempted(scheduled)
        while not scheduled.chunks and scheduled.preempted:
            scheduled = self.scheduler.schedule()
            self._note_preempted(scheduled)
        if not scheduled.chunks:
            self.step = None
            return None
        for sequence in scheduled.admitted:
            queued = self._queued_at.pop(sequence.request_id, None)
            if queued is not None:
                self.counters.queue_seconds += now - queued
                self.counters.queued_requests += 1
        self.step = self._measure(scheduled)
        return self.step

    def end_step(self, now: float) -> list[RequestRecord]:
        """Those that are finished now."""
        step, counters = self.step, self.counters
        assert step is not None
        self.step = None
        done = self.scheduler.complete(step.scheduled, step.sampled)
        counters.steps += 1
        counters.busy_seconds += step.duration
        counters.recomputed_tokens += done.recomputed_tokens
        counters.prompt_tokens += done.prompt_tokens
        counters.generation_tokens += len(step.sampled)
        counters.computed_tokens += step.tokens
        for sequence in step.answering:
            record = self.live[sequence.request_id]
            if record.first_token is None:
                record.first_token = now
        return [self._finish(sequence, now) for sequence in step.ending]

    def drop_all(self) -> list[RequestRecord]:
        """Those that were in flight, and are lost."""
        lost = list(self.live.values())
        self.live = {}
        self.step = None
        self.state = ReplicaState.DOWN
        return lost

    def overflows(self, now: float, step: Step) -> bool:
        return self.memory.overflows(now, self.committed, step.beyond)

    def set_limits(self, limits: SchedulerLimits) -> None:
        if limits != self.scheduler.limits:
            self.scheduler.limits = limits

    def settle_line(self, now: float) -> None:
        """The cache follows ``utilization``: blocks in use above the line are waited for, what lives
        may grow to its end, and no more is mapped than is free."""
        if self.settings.num_gpu_blocks_override is not None:
            return
        wanted = pool_blocks(self.hardware, self.model, self.utilization)
        wanted = max(wanted, self.scheduler.largest_need)
        pool = self.pool
        if wanted == pool.usable == pool.committed:
            return
        if wanted > pool.committed:
            room = self.memory.free(now, pool.committed) // self.memory.block_bytes
            wanted = min(wanted, pool.committed + room)
            pool.set_committed(wanted)
        if wanted != pool.usable:
            pool.set_usable(wanted)
        pool.set_committed(max(wanted, pool.owned_end))

    def _build_scheduler(self, settings: EngineSettings) -> Scheduler:
        limits = settings.scheduler_limits
        if settings.admission is Admission.PROMPT:
            return Scheduler(self.pool, BLOCK_SIZE, limits, prefix_caching=settings.prefix_caching)
        knows = settings.admission is Admission.TRUE_OUTPUTS
        foresight = know if knows else self._past_outputs.draw
        return PeakScheduler(self.pool, BLOCK_SIZE, limits, foresight)

    def _prompt(self, request: SimulatedRequest) -> tuple[int, ...]:
        """What the tokens are plays no part, but that no two requests share them."""
        return (request.number,) * request.input_tokens

    def _measure(self, scheduled: ScheduledStep) -> Step:
        prefills: list[Prefill] = []
        sampled: dict[str, int] = {}
        answering: list[Sequence] = []
        ending: list[Sequence] = []
        decoding = held = tokens = longest = rows = 0
        for chunk in scheduled.chunks:
            sequence, count = chunk.sequence, chunk.count
            end = chunk.start + count
            produced = end - sequence.num_prompt_tokens
            tokens += count
            longest = max(longest, end)
            if count == 1 and produced > 0:
                decoding += 1
                held += end
            else:
                prefills.append((count, chunk.start))
                if sequence.request.params.prompt_logprobs is not None:
                    rows += count
            if end == len(sequence.tokens):
                sampled[sequence.request_id] = sequence.tokens[0]
                if produced == 0:
                    answering.append(sequence)
                if produced + 1 >= sequence.request.params.max_tokens:
                    ending.append(sequence)
        duration = self._step_time(prefills, decoding, held)
        beyond = self.memory.activations_beyond_profile(tokens, longest, rows)
        return Step(scheduled, tokens, sampled, answering, ending, duration, beyond)

    def _note_preempted(self, scheduled: ScheduledStep) -> None:
        for sequence in scheduled.preempted:
            self.counters.preemptions += 1
            self.live[sequence.request_id].preemptions += 1

    def _finish(self, sequence: Sequence, now: float) -> RequestRecord:
        assert sequence.state is SequenceState.RUNNING
        self.scheduler.finish(sequence)
        record = self.live.pop(sequence.request_id)
        record.finished = now
        self.finished_lengths.append((sequence.num_prompt_tokens, sequence.num_output_tokens))
        self._past_outputs.add(sequence.num_output_tokens)
        return record


@cache
def _params(max_tokens: int, prompt_logprobs: bool) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, prompt_logprobs=0 if prompt_logprobs else None)
