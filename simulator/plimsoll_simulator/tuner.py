"""The operator's real tuner on simulated replicas: the policy "plimsoll".

In: a replica's counters as a page would have them. Out: limits set on the replica. This is the only
module that knows both sides; the tuner decides, nothing is decided here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from plimsoll_engine import sequence as engine_sequence
from plimsoll_engine.scheduler import SchedulerLimits
from plimsoll_operator.spec import TuningMode
from plimsoll_operator.tuning import decide
from plimsoll_operator.tuning.values import (
    EngineReading,
    Failure,
    FailureClass,
    Learned,
    LengthCounts,
    Limits,
    Settings,
    TuningInputs,
    TuningState,
)
from plimsoll_simulator.hardware import BLOCK_SIZE
from plimsoll_simulator.records import Death, DeathCause, Move
from plimsoll_simulator.replica import EngineSettings, Replica, ReplicaState
from plimsoll_simulator.simulation import DRAIN_SECONDS, SCRAPE_INTERVAL, Fleet

_CLASSES = {
    DeathCause.OOM: FailureClass.CUDA_OOM_AT_RUNTIME,
    DeathCause.OOM_AT_START: FailureClass.CUDA_OOM_AT_START,
    DeathCause.BUSY_AT_START: FailureClass.GPU_BUSY_AT_START,
}
# The low-water mark covers a minute.
_LOW_WATER_SAMPLES = 12
# vLLM's buckets of request lengths.
_BOUNDS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


@dataclass
class _Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS) + 1))

    def add(self, tokens: int) -> None:
        self.counts[bisect_left(_BOUNDS, tokens)] += 1

    def page(self) -> LengthCounts:
        """Cumulative, as on a metrics page."""
        total, found = 0, []
        for bound, count in zip((*_BOUNDS, float("inf")), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return tuple(found)


@dataclass
class _Page:
    """What is kept between two pages of one life."""

    started_at: float
    prompts: _Histogram = field(default_factory=_Histogram)
    outputs: _Histogram = field(default_factory=_Histogram)
    free: list[int] = field(default_factory=list)


def tuning_settings(start: EngineSettings, floor: int) -> Settings:
    """As a spec gives them: Auto, 0.80 to 0.94, the length from ``floor`` to what fits."""
    return Settings(
        mode=TuningMode.AUTO,
        start=Limits(gpu_memory_utilization=start.utilization),
        min_utilization=0.80,
        max_utilization=0.94,
        tunes_length=True,
        floor=floor,
        ceiling=None,
        block_size=BLOCK_SIZE,
        on_cpu=False,
        memory_limit=None,
        time_to_first_token=2.0,
        scrape_interval=SCRAPE_INTERVAL,
        generation=1,
        max_num_seqs=start.max_num_seqs,
        max_num_batched_tokens=start.max_num_batched_tokens,
        drain=DRAIN_SECONDS,
    )


class Tuner:
    """A Controller."""

    def __init__(self, settings: Settings, learned: Learned | None = None) -> None:
        self._settings = settings
        self._state = TuningState()
        self._learned = learned or Learned()
        self._pages: dict[str, _Page] = {}
        self._failures: dict[str, Failure] = {}
        self._deaths = 0

    def observe(self, now: float, fleet: Fleet, deaths: Sequence[Death]) -> None:
        for death in deaths:
            self._deaths += 1
            self._failures[death.replica] = _failure(death, self._deaths)
        serving = [r for r in fleet.replicas if r.state is ReplicaState.SERVING]
        decision = decide(
            TuningInputs(
                settings=self._settings,
                engines={replica.name: self._read(replica, now) for replica in serving},
                failures=tuple(self._failures.values()),
                state=self._state,
                learned=self._learned,
                now=now,
            )
        )
        self._state, self._learned = decision.state, decision.learned
        for change in decision.changes:
            fleet.note(Move(now, change.parameter, change.before, change.after, change.reason))
        for replica in fleet.replicas:
            fleet.use_at_start(replica, _at_start(fleet.settings_of(replica), decision.limits))
            if replica.state is not ReplicaState.DOWN:
                apply(replica, decision.limits, decision.revision, now)

    def _read(self, replica: Replica, now: float) -> EngineReading:
        page = self._pages.get(replica.name)
        if page is None or page.started_at != replica.started_at:
            page = self._pages[replica.name] = _Page(replica.started_at)
        for prompt, output in replica.finished_lengths:
            page.prompts.add(prompt)
            page.outputs.add(output)
        replica.finished_lengths.clear()
        counters, pool, memory = replica.counters, replica.pool, replica.memory
        free = memory.free(now, pool.committed)
        page.free = [*page.free, free][-_LOW_WATER_SAMPLES:]
        block = memory.block_bytes
        activations = int(memory.profiled)
        planned = {
            "weights": replica.model.weight_bytes,
            "activations": activations,
            "runtime": replica.hardware.reserved_bytes - activations,
            "kv_cache": pool.usable * block,
        }
        return EngineReading(
            pod=replica.name,
            at=now,
            kv_cache_usage=pool.used / pool.usable,
            waiting=replica.scheduler.num_waiting,
            running=len(replica.scheduler.running),
            preemptions_total=counters.preemptions,
            started_at=replica.started_at,
            steps_total=counters.steps,
            queue_seconds_total=counters.queue_seconds,
            queued_requests_total=counters.queued_requests,
            rejected_over_length_total=counters.over_length,
            recomputed_tokens_total=counters.recomputed_tokens,
            prompt_tokens_total=counters.prompt_tokens,
            generation_tokens_total=counters.generation_tokens,
            allocation_failures_total=0,
            device_total_bytes=replica.hardware.total_bytes,
            device_free_bytes=free,
            device_free_low_water_bytes=min(page.free),
            planned_bytes=planned,
            actual_bytes={**planned, "kv_cache": pool.committed * block},
            block_size=BLOCK_SIZE,
            usable_blocks=pool.usable,
            committed_blocks=pool.committed,
            max_model_len_admitted=replica.admitted_length,
            max_model_len_ceiling=replica.ceiling,
            short_wait=_waited(replica.scheduler.first_short, now),
            long_wait=_waited(replica.scheduler.first_long, now),
            gpu_memory_utilization=replica.utilization,
            limits_revision=replica.revision,
            step_heartbeat_age=0.0,
            prompt_lengths=page.prompts.page(),
            output_lengths=page.outputs.page(),
        )


def _waited(sequence: engine_sequence.Sequence | None, now: float) -> float:
    return 0.0 if sequence is None else now - sequence.request.arrival_time


def apply(replica: Replica, limits: Limits, revision: int, now: float) -> None:
    """As an engine takes over SetLimits: what is None stays with the flags of its start."""
    flags = replica.settings

    def chosen(limit: float | None, flag: float) -> float:
        return flag if limit is None else limit

    replica.scheduler.limits = SchedulerLimits(
        max_num_seqs=int(chosen(limits.max_num_seqs, flags.max_num_seqs)),
        max_num_batched_tokens=int(
            chosen(limits.max_num_batched_tokens, flags.max_num_batched_tokens)
        ),
        watermark=chosen(limits.watermark, flags.watermark),
        long_prompt_tokens=(
            flags.long_prompt_tokens
            if limits.long_prompt_tokens is None
            else limits.long_prompt_tokens
        ),
        long_prompt_share=chosen(limits.long_prompt_share, flags.long_prompt_share),
        long_queue_share=flags.long_queue_share,
    )
    replica.admitted_length = int(chosen(limits.max_model_len, replica.ceiling))
    replica.utilization = chosen(limits.gpu_memory_utilization, flags.utilization)
    replica.revision = revision
    replica.settle_line(now)


def _at_start(settings: EngineSettings, limits: Limits) -> EngineSettings:
    """The limits file gives a new life the line in force."""
    line = limits.gpu_memory_utilization
    return settings if line is None else replace(settings, utilization=line)


def _failure(death: Death, number: int) -> Failure:
    return Failure(
        failure_class=_CLASSES[death.cause],
        incident=f"{death.replica}-{number}",
        pod=death.replica,
        message=f"{death.needed_bytes / 2**20:.0f} MiB were needed",
        at=death.time,
        started_at=death.started_at,
        exit_code=1,
        serving=death.cause is DeathCause.OOM,
    )
