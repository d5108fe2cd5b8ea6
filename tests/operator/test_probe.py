"""The prompt that a canary gets, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from plimsoll_operator.observed import Pod
from plimsoll_operator.plan.canary import Probe, ProbeOutcome
from plimsoll_operator.probe import Probes, send_probe
from support.apiserver import until
from support.resources import deployment, pod

Json = dict[str, Any]


class Engine:
    """Answers as it is told, and keeps what it was asked."""

    def __init__(self) -> None:
        self.status, self.asked = 200, []  # type: int, list[tuple[Json, str | None]]
        self.go_on, self.came = asyncio.Event(), asyncio.Event()
        self.go_on.set()

    async def complete(self, request: web.Request) -> web.Response:
        self.asked.append((await request.json(), request.headers.get("Authorization")))
        self.came.set()
        await self.go_on.wait()
        return web.json_response({"message": "in its words"}, status=self.status)


@pytest.fixture
async def engine() -> Engine:
    return Engine()


@pytest.fixture
async def port(engine: Engine) -> AsyncIterator[int]:
    application = web.Application(client_max_size=1 << 24)
    application.router.add_post("/v1/completions", engine.complete)
    async with TestServer(application) as server:
        assert server.port is not None
        yield server.port


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def canary() -> Pod:
    return replace(pod("assistant-1"), ip="127.0.0.1")


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, ProbeOutcome.PASSED),
        (429, ProbeOutcome.BUSY),
        (503, ProbeOutcome.BUSY),
        (400, ProbeOutcome.REFUSED),
        (401, ProbeOutcome.REFUSED),
        (404, ProbeOutcome.REFUSED),
        (500, ProbeOutcome.FAILED),
    ],
)
async def test_what_an_answer_means(
    engine: Engine, port: int, session: aiohttp.ClientSession, status: int, outcome: ProbeOutcome
) -> None:
    engine.status = status
    found = await send_probe(
        session, canary(), model="m", tokens=3000, api_key="key", within=5, port=port
    )
    assert (found.outcome, found.prompt_tokens, found.pod_uid) == (outcome, 3000, canary().uid)
    assert status == 200 or "in its words" in found.message
    ((body, authorization),) = engine.asked
    assert authorization == "Bearer key"
    assert (body["model"], len(body["prompt"]), body["max_tokens"]) == ("m", 3000, 4)
    assert len(set(body["prompt"])) > 100, "no prefix of it is cached"


async def test_no_answer_is_a_failure(
    engine: Engine, port: int, session: aiohttp.ClientSession
) -> None:
    engine.go_on.clear()
    late = await send_probe(
        session, canary(), model="m", tokens=9, api_key=None, within=0.05, port=port
    )
    assert late.outcome is ProbeOutcome.FAILED
    assert "not answered within 0.05 s" in late.message
    nobody = await send_probe(
        session, canary(), model="m", tokens=9, api_key=None, within=5, port=1
    )
    assert nobody.outcome is ProbeOutcome.FAILED


async def test_it_is_sent_once_and_beside_the_passes(
    engine: Engine, port: int, session: aiohttp.ClientSession
) -> None:
    engine.go_on.clear()
    probes = Probes(session)
    answers = []

    def ask() -> Probe | None:
        return probes.ask(deployment(), canary(), tokens=99, api_key=None, port=port)

    async def answered() -> bool:
        answers.append(ask())
        return answers[-1] is not None

    assert ask() is None
    await engine.came.wait()
    assert ask() is None
    engine.go_on.set()
    await until(answered, 5)
    assert len(engine.asked) == 1
    await probes.stop()
