"""The event loop: clients, a router, replicas and a controller in virtual time.

In: a workload, replicas, a controller. Out: a RunRecord. Deterministic.

Clients retry once, 5 s after a refusal that is not final or after an answer that broke off. A death
by memory loses everything in flight and costs a start; a restart by the controller drains first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Protocol

from plimsoll_simulator.hardware import BLOCK_SIZE
from plimsoll_simulator.records import (
    Death,
    DeathCause,
    Move,
    Refusal,
    RequestRecord,
    Restart,
    RunRecord,
    Sample,
)
from plimsoll_simulator.replica import EngineSettings, Replica, ReplicaState
from plimsoll_simulator.workload import Workload

RETRY_AFTER = 5.0
MAX_ATTEMPTS = 2
SCRAPE_INTERVAL = 5.0
DRAIN_SECONDS = 60.0
START_SECONDS = 120.0
# A start that finds the device busy is tried again.
_BACK_OFF = 30.0
# After the last arrival a run goes on until all is answered, but not for ever.
_OVERTIME = 2 * 3600.0


class Controller(Protocol):
    """Looks at the replicas every scrape interval, and may move limits or order restarts."""

    def observe(self, now: float, fleet: Fleet, deaths: Sequence[Death]) -> None: ...


class NoController:
    def observe(self, now: float, fleet: Fleet, deaths: Sequence[Death]) -> None:
        """Static settings stay."""


class _Kind(IntEnum):
    """In the order in which events of one moment are handled."""

    STEP_END = 0
    UP = 1
    DRAINED = 2
    ARRIVAL = 3
    TICK = 4


class Fleet:
    """The replicas of one deployment with their clients."""

    def __init__(
        self,
        workload: Workload,
        replicas: Sequence[Replica],
        controller: Controller,
        *,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self.replicas = tuple(replicas)
        self._controller = controller
        self._start_seconds = start_seconds
        self._events: list[tuple[float, int, int, object]] = []
        self._number = 0
        self._next_settings = {replica.name: replica.settings for replica in replicas}
        # Ends of steps and drains of an earlier life are void.
        self._lives = {replica.name: 0 for replica in replicas}
        self._deaths: list[Death] = []
        first = self.replicas[0]
        self.record = RunRecord(
            workload,
            [RequestRecord(request) for request in workload.requests],
            first.hardware.total_bytes,
            first.model.native_length,
        )
        self._open = len(self.record.requests)

    def run(self) -> RunRecord:
        record, workload = self.record, self.record.workload
        for replica in self.replicas:
            self._check_start(replica, 0.0)
        arrivals = iter(record.requests)
        self._push_next(arrivals)
        self._push(SCRAPE_INTERVAL, _Kind.TICK, None)
        limit = workload.span + _OVERTIME
        now = 0.0
        while self._events:
            now, kind, _, payload = heapq.heappop(self._events)
            if now > limit:
                break
            if kind == _Kind.STEP_END:
                self._end_step(payload, now)
            elif kind == _Kind.ARRIVAL:
                assert isinstance(payload, RequestRecord)
                if not payload.attempts:
                    self._push_next(arrivals)
                self._arrive(payload, now)
            elif kind == _Kind.TICK:
                self._tick(now)
                if self._open or now < workload.span:
                    self._push(now + SCRAPE_INTERVAL, _Kind.TICK, None)
            elif kind == _Kind.UP:
                assert isinstance(payload, Replica)
                self._come_up(payload, now)
            else:
                self._end_drain(payload, now)
        record.end = now
        for replica in self.replicas:
            self._close_life(replica)
        return record

    # What a controller may do.

    def restart(self, replica: Replica, settings: EngineSettings, now: float) -> None:
        """Drains, then starts with ``settings``."""
        self._next_settings[replica.name] = settings
        if replica.state is not ReplicaState.SERVING:
            return
        replica.state = ReplicaState.DRAINING
        self._push(now + DRAIN_SECONDS, _Kind.DRAINED, (replica, self._lives[replica.name]))
        if not replica.outstanding:
            self._stop(replica, now)

    def settings_of(self, replica: Replica) -> EngineSettings:
        """Of its next start."""
        return self._next_settings[replica.name]

    def use_at_start(self, replica: Replica, settings: EngineSettings) -> None:
        self._next_settings[replica.name] = settings

    def note(self, move: Move) -> None:
        self.record.moves.append(move)

    def wake(self, replica: Replica, now: float) -> None:
        """Begins a step, if none is under way and there is something to do."""
        if replica.step is not None or replica.state is ReplicaState.DOWN or not replica.live:
            return
        step = replica.begin_step(now)
        if step is None:
            return
        if replica.overflows(now, step):
            self._die(replica, now, DeathCause.OOM, step.beyond)
            return
        self._push(now + step.duration, _Kind.STEP_END, (replica, self._lives[replica.name]))

    # Events.

    def _push(self, time: float, kind: _Kind, payload: object) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, kind, self._number, payload))

    def _push_next(self, arrivals: Iterator[RequestRecord]) -> None:
        record = next(arrivals, None)
        if record is not None:
            self._push(record.request.time, _Kind.ARRIVAL, record)

    def _arrive(self, record: RequestRecord, now: float) -> None:
        record.attempts += 1
        serving = [r for r in self.replicas if r.state is ReplicaState.SERVING]
        if not serving:
            self._refuse(record, Refusal.NOT_HERE, now)
            return
        replica = min(serving, key=lambda r: (r.outstanding, r.name))
        total = record.request.total_tokens
        if total > replica.ceiling:
            self._refuse(record, Refusal.NEVER, now)
        elif not replica.admits(total):
            replica.counters.over_length += 1
            self._refuse(record, Refusal.NOT_NOW, now)
        elif not replica.may_wait(record.request.input_tokens):
            self._refuse(record, Refusal.NOT_NOW, now)
        else:
            replica.add(record, now)
            self.wake(replica, now)

    def _refuse(self, record: RequestRecord, refusal: Refusal, now: float) -> None:
        record.refusals.append(refusal)
        if refusal is Refusal.NEVER:
            self._open -= 1
        else:
            self._retry(record, now)

    def _retry(self, record: RequestRecord, now: float) -> None:
        if record.attempts < MAX_ATTEMPTS:
            self._push(now + RETRY_AFTER, _Kind.ARRIVAL, record)
        else:
            self._open -= 1

    def _end_step(self, payload: object, now: float) -> None:
        replica = self._of_this_life(payload)
        if replica is None:
            return
        self._open -= len(replica.end_step(now))
        if replica.state is ReplicaState.DRAINING and not replica.outstanding:
            self._stop(replica, now)
        else:
            self.wake(replica, now)

    def _end_drain(self, payload: object, now: float) -> None:
        replica = self._of_this_life(payload)
        if replica is not None and replica.state is ReplicaState.DRAINING:
            self._stop(replica, now)

    def _of_this_life(self, payload: object) -> Replica | None:
        assert isinstance(payload, tuple)
        replica, life = payload
        assert isinstance(replica, Replica)
        return replica if life == self._lives[replica.name] else None

    def _stop(self, replica: Replica, now: float) -> None:
        lost = self._end_life(replica, now)
        self.record.restarts.append(Restart(now, replica.name, lost))
        self._push(now + self._start_seconds, _Kind.UP, replica)

    def _die(self, replica: Replica, now: float, cause: DeathCause, beyond: float) -> None:
        needed = replica.memory.held(now, replica.committed) + beyond
        started, utilization = replica.started_at, replica.utilization
        lost = self._end_life(replica, now)
        death = Death(now, replica.name, cause, lost, started, utilization, needed)
        self.record.deaths.append(death)
        self._deaths.append(death)
        back_off = cause is DeathCause.BUSY_AT_START
        self._push(now + (_BACK_OFF if back_off else self._start_seconds), _Kind.UP, replica)

    def _end_life(self, replica: Replica, now: float) -> int:
        self._close_life(replica)
        lost = replica.drop_all()
        self._lives[replica.name] += 1
        for record in lost:
            record.lost += 1
            record.first_token = None
            self._retry(record, now)
        return len(lost)

    def _close_life(self, replica: Replica) -> None:
        counters, record = replica.counters, self.record
        record.steps += counters.steps
        record.computed_tokens += counters.computed_tokens
        record.recomputed_tokens += counters.recomputed_tokens
        record.preemptions += counters.preemptions
        record.busy_seconds += counters.busy_seconds

    def _come_up(self, replica: Replica, now: float) -> None:
        replica.start(self._next_settings[replica.name], now)
        self._check_start(replica, now)

    def _check_start(self, replica: Replica, now: float) -> None:
        """An engine refuses to start where its share of the device is not free."""
        memory, total = replica.memory, replica.hardware.total_bytes
        if memory.free_at_start(now) < replica.utilization * total:
            self._die(replica, now, DeathCause.BUSY_AT_START, 0.0)
        elif memory.held(now, replica.committed) > total:
            self._die(replica, now, DeathCause.OOM_AT_START, 0.0)

    def _tick(self, now: float) -> None:
        for replica in self.replicas:
            if replica.state is not ReplicaState.DOWN:
                replica.settle_line(now)
                if replica.memory.overflows(now, replica.committed, -replica.memory.profiled):
                    self._die(replica, now, DeathCause.OOM, 0.0)
            self.record.samples.append(_sample(replica, now))
        deaths, self._deaths = self._deaths, []
        self._controller.observe(now, self, deaths)
        for replica in self.replicas:
            self.wake(replica, now)


def _sample(replica: Replica, now: float) -> Sample:
    pool = replica.pool
    serving = replica.state is not ReplicaState.DOWN
    scheduler = replica.scheduler
    return Sample(
        time=now,
        serving=serving,
        running=len(scheduler.running) if serving else 0,
        waiting=scheduler.num_waiting if serving else 0,
        kv_usage=pool.used / pool.usable if serving else 0.0,
        held_tokens=pool.used * BLOCK_SIZE - scheduler.slots_unused if serving else 0,
        pool_tokens=pool.usable * BLOCK_SIZE,
        free_bytes=replica.memory.free(now, pool.committed) if serving else 0,
        utilization=replica.utilization,
        admitted_length=replica.admitted_length,
    )
