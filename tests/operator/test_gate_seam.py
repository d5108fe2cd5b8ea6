"""Operator and gate, each the real one, before a scripted vLLM: its page is read, its limits move."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from plimsoll_engine.control.credentials import ControlCredentials
from plimsoll_engine.control.server import ControlChannel
from plimsoll_engine.gate.control import ControlledGate
from plimsoll_engine.gate.gate import Gate
from plimsoll_operator import runtimes
from plimsoll_operator.control import control_address, set_limits
from plimsoll_operator.credentials import make_credentials
from plimsoll_operator.metrics_page import read_page
from plimsoll_operator.spec import RuntimeName, TuningMode
from plimsoll_operator.tuning.signals import Signals, judge
from plimsoll_operator.tuning.values import EngineReading, Limits, OutcomeKind
from support.gate_harness import PAGE, Harness, Upstream, open_gate
from support.tuning import Fleet, with_lane

CREDENTIALS = make_credentials("assistant", time.time())
LIVE = runtimes.live_limits(RuntimeName.VLLM)


@contextmanager
def control_channel(gate: Gate) -> Iterator[str]:
    channel = ControlChannel(
        ControlledGate(gate, asyncio.get_running_loop()),
        port=0,
        credentials=lambda: ControlCredentials(
            CREDENTIALS.certificate, CREDENTIALS.key, CREDENTIALS.token.decode()
        ),
    )
    channel.start()
    try:
        yield control_address("127.0.0.1", channel.port)
    finally:
        channel.stop()


async def reading_of(harness: Harness) -> EngineReading:
    async with harness.client.get(f"{harness.url}/metrics") as answer:
        found = read_page(await answer.text(), pod="m-0", model="m", at=1.0)
    assert isinstance(found, EngineReading)
    return found


async def test_the_page_has_what_the_tuner_needs() -> None:
    async with open_gate(max_num_seqs=1) as harness:
        held = harness.complete("a")
        first = await harness.next()
        waiting = harness.complete("b")
        async with asyncio.timeout(20):
            while not harness.gate.waiting:  # noqa: ASYNC110 (the gate has no event for it)
                await asyncio.sleep(0.01)
        found = await reading_of(harness)
        first.answer_json()
        (await harness.next()).answer_json()
        await asyncio.gather(held, waiting)
    assert isinstance(judge((found,)), Signals)
    # vLLM's three, and the one that the gate holds back.
    assert found.waiting == 4
    assert (found.max_model_len_ceiling, found.limits_revision) == (1000, 0)
    assert (found.gpu_memory_utilization, found.block_size) == (0.9, 16)
    # Nobody tells of the device: unknown, not zero.
    assert found.device_total_bytes is None
    assert found.planned_bytes == {}


async def test_with_several_engines_the_gates_word_is_the_pods() -> None:
    lines = [line for line in PAGE.splitlines() if 'engine="0"' in line]
    second = "\n".join(line.replace('engine="0"', 'engine="1"') for line in lines)
    async with open_gate(Upstream(page=f"{PAGE}{second}\n")) as harness:
        found = await reading_of(harness)
    assert (found.max_model_len_admitted, found.limits_revision) == (1000, 0)


async def test_the_gate_takes_every_limit_that_the_tuner_sends_it() -> None:
    settings = with_lane(live=LIVE, floor=100, ceiling=1000, min_utilization=0.9)
    settings = replace(settings, start=Limits(800, 0.9))
    fleet = Fleet(settings)
    start = fleet.look().limits.only(LIVE)
    assert start.long_prompt_share is not None
    fleet.settings = replace(settings, mode=TuningMode.OFF)
    neutral = fleet.look().limits.only(LIVE)
    async with open_gate() as harness:
        with control_channel(harness.gate) as address:
            for revision, limits in enumerate((start, neutral), start=1):
                outcome = await set_limits(
                    address, CREDENTIALS, pod="m-0", revision=revision, limits=limits
                )
                assert outcome.kind is OutcomeKind.APPLIED, outcome.reason
                found = await reading_of(harness)
                assert (found.limits_revision, found.max_model_len_admitted) == (revision, 800)
            # What only a restart of vLLM moves would be refused, and is why it is not sent.
            outcome = await set_limits(
                address, CREDENTIALS, pod="m-0", revision=9, limits=Limits(watermark=0.05)
            )
            assert outcome.kind is OutcomeKind.REJECTED
