"""Operator and engine, each the real one, on loopback: pages, limits and sums agree."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import pytest

from plimsoll_engine.control.credentials import ControlCredentials
from plimsoll_engine.control.reports import EngineIdentity
from plimsoll_engine.control.server import ControlServer
from plimsoll_operator.control import control_address, get_memory_report, set_limits
from plimsoll_operator.credentials import make_credentials
from plimsoll_operator.metrics_page import read_page
from plimsoll_operator.spec import TuningMode
from plimsoll_operator.tuning.bounds import find_bounds
from plimsoll_operator.tuning.policy import DEFAULT_POLICY
from plimsoll_operator.tuning.signals import Signals, judge
from plimsoll_operator.tuning.values import (
    LANE,
    EngineReading,
    Learned,
    Limits,
    LimitsOutcome,
    OutcomeKind,
)
from support.engine_server import ApiServer, api_server, repeat
from support.tuning import Fleet, settings, with_lane

ALERTS = Path(__file__).parents[2] / "charts" / "plimsoll" / "files" / "alerts.yaml"
CREDENTIALS = make_credentials("assistant", time.time())


@contextmanager
def engine(num_blocks: int = 160) -> Iterator[tuple[ApiServer, str]]:
    """A running engine and the address of its control channel."""
    with api_server(repeat("ab"), num_blocks=num_blocks) as running:
        control = ControlServer(
            running.core,
            EngineIdentity("0.1.0", "m", "cpu", 1),
            port=0,
            credentials=lambda: ControlCredentials(
                CREDENTIALS.certificate, CREDENTIALS.key, CREDENTIALS.token.decode()
            ),
        )
        control.start()
        try:
            yield running, control_address("127.0.0.1", control.port)
        finally:
            control.stop()


def page_of(running: ApiServer) -> str:
    return running.client.get("/metrics").text


def reading_of(running: ApiServer) -> EngineReading:
    found = read_page(page_of(running), pod="m-0", model="m", at=1.0)
    assert isinstance(found, EngineReading)
    return found


async def move(address: str, revision: int, limits: Limits) -> LimitsOutcome:
    return await set_limits(address, CREDENTIALS, pod="m-0", revision=revision, limits=limits)


def test_every_field_of_a_reading_is_on_the_engines_page() -> None:
    with engine() as (running, _):
        running.complete(prompt="four", max_tokens=6)
        found = reading_of(running)
    unknown = [f.name for f in fields(found) if getattr(found, f.name) in (None, {}, ())]
    assert unknown == []
    assert set(found.planned_bytes) == {"weights", "activations", "graphs", "runtime", "kv_cache"}
    assert isinstance(judge((found,)), Signals)
    assert found.generation_tokens_total == 6.0
    assert found.output_lengths[-1][1] == found.prompt_lengths[-1][1] == 1.0


def test_every_metric_of_an_alert_is_on_the_engines_page() -> None:
    named = set(re.findall(r"\b(?:vllm|plimsoll):\w+", ALERTS.read_text()))
    assert len(named) >= 3
    with engine() as (running, _):
        page = page_of(running)
    assert [name for name in named if f"\n{name}{{" not in page] == []


async def test_a_moved_limit_shows_on_the_page_with_its_revision() -> None:
    with engine() as (running, address):
        outcome = await move(address, 3, Limits(max_model_len=512))
        assert outcome.kind is OutcomeKind.APPLIED
        assert outcome.effective is not None
        assert outcome.effective.max_model_len == 512
        found = reading_of(running)
        assert (found.limits_revision, found.max_model_len_admitted) == (3, 512)
        assert found.max_model_len_ceiling == 2048
        report = await get_memory_report(address, CREDENTIALS, pod="m-0")
        assert report.limits_revision == 3  # type: ignore[union-attr]

        assert (await move(address, 2, Limits())).kind is OutcomeKind.REJECTED
        assert (await move(address, 4, Limits(max_model_len=4096))).kind is OutcomeKind.REJECTED


async def test_the_engine_takes_every_limit_that_the_tuner_sends() -> None:
    """The first decision's lane, and what takes it out of force again."""
    fleet = Fleet(with_lane(mode=TuningMode.AUTO))
    start = fleet.look().limits
    fleet.settings = with_lane(mode=TuningMode.OFF)
    neutral = fleet.look().limits
    with engine() as (_, address):
        for revision, wanted in enumerate((start, neutral), start=1):
            lane = replace(wanted, max_model_len=None, gpu_memory_utilization=None)
            outcome = await move(address, revision, lane)
            assert outcome.kind is OutcomeKind.APPLIED, outcome.reason
            assert outcome.effective is not None
            for parameter in LANE:
                sent = lane.value(parameter)
                assert sent is None or outcome.effective.value(parameter) == sent


@pytest.mark.parametrize("num_blocks", [128, 129, 140, 160, 400])
async def test_the_least_line_that_the_tuner_goes_to_is_one_that_the_engine_takes(
    num_blocks: int,
) -> None:
    """The tuner reckons from the page how low the line may go for the admitted length; the engine
    refuses a line too low. The tuner may be careful by a hundredth or two, and never too bold."""
    with engine(num_blocks) as (running, address):
        found = reading_of(running)
        bounds = find_bounds(
            settings(min_utilization=0.05), (found,), Learned(), DEFAULT_POLICY, now=1.0
        )
        line = found.gpu_memory_utilization
        assert line is not None
        least = bounds.lower_utilization(0.05, line, length=2048)
        lowered = await move(address, 1, Limits(gpu_memory_utilization=least))
        assert lowered.kind in (OutcomeKind.APPLIED, OutcomeKind.DEFERRED), lowered.reason
        bold = await move(address, 2, Limits(gpu_memory_utilization=least - 0.03))
        assert bold.kind is OutcomeKind.REJECTED

        # And the other way: the longest request that the cache holds at a lower line.
        lower = round(least - 0.03, 2)
        longest = bounds.longest_at(lower)
        assert longest is not None
        both = await move(address, 3, Limits(max_model_len=longest, gpu_memory_utilization=lower))
        assert both.kind in (OutcomeKind.APPLIED, OutcomeKind.DEFERRED), both.reason


async def test_two_replicas_under_different_pressure_keep_one_contract() -> None:
    """Within the ceiling no request gets 400 on one and 200 on the other: the squeezed one says later. Above
    it both say never, and both show the same ceiling."""
    with engine(num_blocks=400) as (calm, _), engine(num_blocks=400) as (squeezed, address):
        for revision, limits in enumerate((Limits(max_model_len=256), Limits(max_num_seqs=1)), 1):
            moved = await move(address, revision, limits)
            assert moved.kind is OutcomeKind.APPLIED, moved.reason

        def ask(running: ApiServer, prompt: int) -> int:
            body = {"model": "m", "prompt": [97] * prompt, "max_tokens": 2}
            return running.client.post("/v1/completions", json=body).status_code

        seen = {
            length: (ask(calm, length), ask(squeezed, length))
            for length in (1, 16, 250, 254, 255, 300, 1000, 2045, 2046, 2047, 4000)
        }
        assert reading_of(calm).max_model_len_ceiling == 2048
        assert reading_of(squeezed).max_model_len_ceiling == 2048
    within = {length: codes for length, codes in seen.items() if length + 2 <= 2048}
    assert all(codes[0] == 200 for codes in within.values()), seen
    assert {codes[1] for codes in within.values()} == {200, 429}, seen
    assert {codes for length, codes in seen.items() if length not in within} == {(400, 400)}, seen
