"""Fetching a page over HTTP: every way it can go wrong ends in a value."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web

from plimsoll_operator.scrape import MAX_PAGE_BYTES, scrape_page
from plimsoll_operator.tuning.values import EngineReading, Unknown, UnknownReason

PAGE = """\
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:num_requests_waiting{engine="0",model_name="m"} 2
"""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Read = Callable[..., Awaitable[EngineReading | Unknown]]


@pytest.fixture
async def read() -> AsyncIterator[Read]:
    """Serves a handler on loopback and reads its page."""
    runners: list[web.AppRunner] = []

    async def serve_and_read(handler: Handler, within: float = 5.0) -> EngineReading | Unknown:
        app = web.Application()
        app.router.add_get("/metrics", handler)
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        async with aiohttp.ClientSession() as session:
            return await scrape_page(
                session,
                url=f"http://{host}:{port}/metrics",
                pod="m-0",
                model="m",
                within=within,
                clock=lambda: 42.0,
            )

    yield serve_and_read
    for runner in runners:
        await runner.cleanup()


async def test_a_page_is_read_with_its_time(read: Read) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=PAGE)

    found = await read(answer)
    assert isinstance(found, EngineReading)
    assert (found.pod, found.at, found.kv_cache_usage, found.waiting) == ("m-0", 42.0, 0.5, 2)


async def test_a_page_in_pieces_is_read_whole(read: Read) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for line in PAGE.splitlines(keepends=True):
            await response.write(line.encode())
            await asyncio.sleep(0)
        return response

    assert isinstance(await read(answer), EngineReading)


async def test_an_error_status(read: Read) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=503, text=PAGE)

    found = await read(answer)
    assert isinstance(found, Unknown)
    assert (found.reason, found.pod) == (UnknownReason.BAD_STATUS, "m-0")
    assert "503" in found.message


async def test_an_engine_that_does_not_answer_in_time(read: Read) -> None:
    release = asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        await release.wait()
        return web.Response(text=PAGE)

    found = await read(answer, within=0.05)
    release.set()
    assert isinstance(found, Unknown)
    assert found.reason is UnknownReason.TIMED_OUT


async def test_a_connection_that_breaks(read: Read) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b"vllm:")
        assert request.transport is not None
        request.transport.close()
        return response

    found = await read(answer)
    assert isinstance(found, Unknown)
    assert found.reason is UnknownReason.UNREACHABLE


async def test_nobody_listens() -> None:
    async with aiohttp.ClientSession() as session:
        found = await scrape_page(
            session, url="http://127.0.0.1:9/metrics", pod="m-0", model="m", within=5.0
        )
    assert isinstance(found, Unknown)
    assert found.reason is UnknownReason.UNREACHABLE


async def test_a_page_without_end_is_not_kept(read: Read) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(MAX_PAGE_BYTES // 2**20 + 1):
            await response.write(b"#" * 2**20)
        return response

    found = await read(answer)
    assert isinstance(found, Unknown)
    assert found.reason is UnknownReason.UNREADABLE


async def test_a_redirection_is_not_followed(read: Read) -> None:
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        raise web.HTTPFound("http://169.254.169.254/metrics")

    found = await read(answer)
    assert isinstance(found, Unknown)
    assert found.reason is UnknownReason.BAD_STATUS
    assert "answered 302" in found.message
    assert asked == ["/metrics"]
