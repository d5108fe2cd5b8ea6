"""The core across threads: nobody waits by sleeping, everything is told by an event."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from plimsoll_engine.admission import RefusalReason, Refused
from plimsoll_engine.config import EngineConfig
from plimsoll_engine.core import EngineCore, FinishReason, RequestOutput
from plimsoll_engine.executor import ModelLimits, StepBatch
from plimsoll_engine.limits import Limits, LimitsOutcome
from plimsoll_engine.sampling_params import Request
from plimsoll_engine.termination import EngineFailure, FailureClass, Phase
from support.loop_harness import ManualClock, build_request
from support.scripted_executor import ScriptedExecutor, figures

PATIENCE = 60.0


class Client:
    """Collects one request's outputs."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.started = threading.Event()
        self.ended = threading.Event()

    def __call__(self, output: RequestOutput) -> None:
        self.outputs.append(output)
        self.started.set()
        if output.finish_reason is not None:
            self.ended.set()

    @property
    def final(self) -> RequestOutput:
        assert self.ended.wait(PATIENCE), "no final output"
        return self.outputs[-1]


class Gate:
    """Holds every step until it is opened, for good or for one step."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._open = False
        self.entered = threading.Event()

    def __call__(self, batch: StepBatch) -> None:
        self.entered.set()
        if not self._open:
            assert self._permits.acquire(timeout=PATIENCE)

    def open(self) -> None:
        self._open = True
        self._permits.release()


@contextmanager
def running(
    before_step: Callable[[StepBatch], None] | None = None,
    clock: ManualClock | None = None,
    **settings: int,
) -> Iterator[EngineCore]:
    config = EngineConfig(model="m", **({"max_model_len": 256} | settings))  # type: ignore[arg-type]
    executor = ScriptedExecutor(memory_figures=figures(32), before_step=before_step)
    core = EngineCore(config, executor, clock=clock or ManualClock())
    core.start()
    try:
        yield core
    finally:
        core.stop()
        assert not executor.running, "the device is released"


def submit(core: EngineCore, request_id: str, prompt: int = 10, output: int = 4) -> Client:
    client = Client()
    core.submit(build_request(request_id, prompt, output), client)
    return client


def test_requests_from_several_threads_each_end_once_with_their_tokens() -> None:
    with running() as core:
        clients: dict[str, Client] = {}

        def send(worker: int) -> None:
            for number in range(10):
                name = f"{worker}-{number}"
                clients[name] = submit(core, name)

        threads = [threading.Thread(target=send, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for client in clients.values():
            assert client.final.finish_reason is FinishReason.LENGTH
        for client in clients.values():
            tokens = [token for output in client.outputs for token in output.new_token_ids]
            assert tokens == [3, 4, 5, 6]
            assert sum(output.finish_reason is not None for output in client.outputs) == 1


def test_when_all_are_cancelled_at_once_the_gauges_fall_without_another_step() -> None:
    """Case B06, the engine's half."""
    with running() as core:
        idle = core.snapshot()
        clients = [submit(core, str(number), 10, 240) for number in range(8)]
        for client in clients:
            assert client.started.wait(PATIENCE)
        for number in range(8):
            core.abort(str(number))
        for client in clients:
            assert client.final.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
        assert core.drain(PATIENCE)
        now = core.snapshot()
        assert (now.running, now.waiting, now.used_blocks) == (0, 0, 0)
        assert now.kv_cache_usage == idle.kv_cache_usage == 0.0


def test_a_snapshot_counts_what_the_loop_has_not_seen_yet() -> None:
    gate = Gate()
    with running(gate) as core:
        first = submit(core, "first")
        assert gate.entered.wait(PATIENCE)
        second = submit(core, "second")
        now = core.snapshot()
        assert now.running + now.waiting == 2
        gate.open()
        assert first.final.finish_reason is second.final.finish_reason is FinishReason.LENGTH


def test_the_heartbeat_ages_while_a_step_hangs() -> None:
    gate, clock = Gate(), ManualClock()
    with running(gate, clock) as core:
        client = submit(core, "r")
        assert gate.entered.wait(PATIENCE)
        clock.now += 77.0
        assert core.snapshot().heartbeat_age == pytest.approx(77.0)
        gate.open()
        assert client.final.finish_reason is FinishReason.LENGTH


def test_refusals_are_raised_at_the_door_and_counted() -> None:
    gate = Gate()
    with running(gate, max_num_queued_reqs=2, max_num_seqs=1) as core:
        clients = [submit(core, "running")]
        assert gate.entered.wait(PATIENCE)
        clients += [submit(core, "one"), submit(core, "two")]

        def refusal(request: Request) -> Refused:
            with pytest.raises(Refused) as caught:
                core.submit(request, Client())
            return caught.value

        long = refusal(build_request("long", 250, 7))
        assert (long.status, long.reason) == (400, RefusalReason.TOO_LONG)
        full = refusal(build_request("three", 10, 4))
        assert (full.status, full.reason) == (429, RefusalReason.QUEUE_FULL)
        twin = refusal(build_request("one", 10, 4))
        assert (twin.status, twin.reason) == (400, RefusalReason.DUPLICATE_REQUEST_ID)
        counted = core.snapshot().refused
        assert counted[RefusalReason.TOO_LONG] == counted[RefusalReason.QUEUE_FULL] == 1
        gate.open()
        assert all(client.final.finish_reason is FinishReason.LENGTH for client in clients)


def test_the_tokens_that_wait_are_bounded_too() -> None:
    gate = Gate()
    with running(gate, max_num_queued_tokens=25, max_num_seqs=1) as core:
        clients = [submit(core, "running")]
        assert gate.entered.wait(PATIENCE)
        clients += [submit(core, "one"), submit(core, "two")]
        with pytest.raises(Refused) as caught:
            core.submit(build_request("three", 10, 4), Client())
        assert (caught.value.status, caught.value.reason) == (429, RefusalReason.QUEUE_FULL)
        assert "25 tokens" in caught.value.message
        gate.open()
        assert all(client.final.finish_reason is FinishReason.LENGTH for client in clients)


def test_limits_are_in_the_snapshot_and_at_the_door_when_the_call_returns() -> None:
    with running() as core:
        result = core.set_limits(4, Limits(max_model_len=50))
        assert result.outcome is LimitsOutcome.APPLIED
        now = core.snapshot()
        assert (now.limits_revision, now.limits.max_model_len, now.ceiling) == (4, 50, 256)
        with pytest.raises(Refused) as caught:
            submit(core, "r", 40, 11)
        assert caught.value.status == 429
        assert submit(core, "s", 40, 10).final.finish_reason is FinishReason.LENGTH


def test_draining_lets_accepted_requests_finish_and_refuses_new_ones() -> None:
    gate = Gate()
    with running(gate) as core:
        client = submit(core, "r")
        assert gate.entered.wait(PATIENCE)
        assert not core.drain(0.0)
        with pytest.raises(Refused) as caught:
            submit(core, "late")
        assert (caught.value.status, caught.value.reason) == (503, RefusalReason.DRAINING)
        gate.open()
        assert core.drain(PATIENCE)
        assert client.final.finish_reason is FinishReason.LENGTH


def test_stopping_ends_what_is_left() -> None:
    gate = Gate()
    with running(gate) as core:
        client = submit(core, "r", 10, 240)
        assert gate.entered.wait(PATIENCE)
        late = submit(core, "unseen")
        stopper = threading.Thread(target=core.stop)
        stopper.start()
        gate.open()
        stopper.join(PATIENCE)
        assert client.final.finish_reason is FinishReason.ABORT
        assert late.final.finish_reason is FinishReason.ABORT
        assert core.failure is None


def test_a_fault_in_the_loop_ends_every_request_with_an_error_and_is_kept() -> None:
    def break_down(batch: StepBatch) -> None:
        raise ZeroDivisionError("a fault of ours")

    with running(break_down) as core:
        client = submit(core, "r")
        assert client.final.finish_reason is FinishReason.ERROR
        assert "a fault of ours" in (client.final.error or "")
        assert core.drain(PATIENCE)
        assert core.failure is not None
        assert core.failure.failure_class is FailureClass.ENGINE_DEAD
        assert core.failure.phase is Phase.SERVING
        with pytest.raises(Refused) as caught:
            submit(core, "late")
        assert (caught.value.status, caught.value.reason) == (503, RefusalReason.ENGINE_DEAD)
        assert core.set_limits(1, Limits()).outcome is LimitsOutcome.REJECTED
        now = core.snapshot()
        assert (now.running, now.waiting) == (0, 0)


def test_a_failure_of_the_start_is_raised_from_it_and_the_device_released() -> None:
    executor = ScriptedExecutor(limits=ModelLimits(1000, 128, 2, 4, 2, 64, "float32"))
    core = EngineCore(EngineConfig(model="m", max_model_len=256), executor)
    with pytest.raises(EngineFailure, match=r"256.*128"):
        core.start()
    assert not executor.running


def test_nothing_can_be_asked_before_the_start() -> None:
    core = EngineCore(EngineConfig(model="m"), ScriptedExecutor())
    with pytest.raises(RuntimeError, match="not started"):
        core.snapshot()
    with pytest.raises(RuntimeError, match="not started"):
        submit(core, "r")
