"""Probe thresholds as tables, and single tries against real listeners on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import aiohttp
import pytest
from aiohttp import web

from plimsoll_local.agent.container import ExecResult
from plimsoll_local.agent.probes import (
    ProbeCount,
    ProbeResult,
    ProbeSchedule,
    resolve_port,
    try_probe,
)
from support.pods import Json, build_container


@pytest.mark.parametrize(
    ("success_threshold", "failure_threshold", "results", "verdicts"),
    [
        # One letter a try: + passed, - failed; then . no verdict yet, y healthy, n not.
        (1, 3, "+", "y"),
        (1, 3, "--+", "..y"),
        (1, 3, "---", "..n"),
        (1, 3, "+--+--", "yyyyyy"),  # never three failures in a row
        (1, 3, "+---+", "yyyny"),
        (2, 1, "+-++", ".nny"),
        (1, 1, "-+-", "nyn"),
    ],
)
def test_a_verdict_needs_so_many_in_a_row(
    success_threshold: int, failure_threshold: int, results: str, verdicts: str
) -> None:
    schedule = ProbeSchedule(0, 10, 1, success_threshold, failure_threshold)
    count = ProbeCount()
    seen = ""
    for result in results:
        count = count.add(result == "+", schedule)
        seen += {None: ".", True: "y", False: "n"}[count.verdict]
    assert seen == verdicts


def test_a_schedule_has_the_defaults_of_the_api() -> None:
    assert ProbeSchedule.of({}) == ProbeSchedule(0, 10, 1, 1, 3)


def test_ports_are_numbers_or_names() -> None:
    container = build_container(ports=[{"name": "http", "containerPort": 8000}])
    assert resolve_port("http", container) == 8000
    assert resolve_port(9, container) == 9
    assert resolve_port("9", container) == 9
    with pytest.raises(ValueError, match="couldn't find port: nope"):
        resolve_port("nope", container)


@pytest.fixture
async def http_port() -> AsyncIterator[int]:
    """A server that answers with the status in the path, or never on /hang."""

    async def answer(request: web.Request) -> web.Response:
        word = request.match_info["word"]
        if word == "hang":
            await asyncio.Event().wait()
        if word == "header":
            return web.Response(status=200 if request.headers.get("X-Key") == "v" else 403)
        return web.Response(status=int(word))

    application = web.Application()
    application.router.add_get("/{word}", answer)
    runner = web.AppRunner(application, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield int(runner.addresses[0][1])
    await runner.cleanup()


async def no_command(argv: Sequence[str], seconds: float) -> ExecResult:
    raise AssertionError("this probe runs no command")


async def try_once(probe: Json) -> ProbeResult:
    async with aiohttp.ClientSession() as session:
        return await try_probe(probe, build_container(), "127.0.0.1", session, no_command)


@pytest.mark.parametrize(
    ("path", "success"),
    [("/200", True), ("/302", True), ("/404", False), ("/500", False), ("/header", True)],
)
async def test_http_by_status(http_port: int, path: str, success: bool) -> None:
    headers = [{"name": "X-Key", "value": "v"}]
    result = await try_once({"httpGet": {"path": path, "port": http_port, "httpHeaders": headers}})
    assert result.success is success
    if not success:
        assert result.message == f"HTTP probe failed with statuscode: {path[1:]}"


async def test_http_that_takes_too_long_fails(http_port: int) -> None:
    probe = {"httpGet": {"path": "/hang", "port": http_port}, "timeoutSeconds": 0.05}
    result = await try_once(probe)
    assert not result.success
    assert "deadline exceeded" in result.message


async def test_tcp(http_port: int, unused_tcp_port: int) -> None:
    assert (await try_once({"tcpSocket": {"port": http_port}})).success
    refused = await try_once({"tcpSocket": {"port": unused_tcp_port}})
    assert not refused.success
    assert str(unused_tcp_port) in refused.message


async def test_exec_by_exit_code_and_timeout() -> None:
    async def run(argv: Sequence[str], seconds: float) -> ExecResult:
        if argv[0] == "hang":
            raise TimeoutError
        return ExecResult(int(argv[0]), "output")

    async with aiohttp.ClientSession() as session:

        async def attempt(command: str) -> ProbeResult:
            probe = {"exec": {"command": [command]}}
            return await try_probe(probe, build_container(), "", session, run)

        assert await attempt("0") == ProbeResult(True, "output")
        assert await attempt("1") == ProbeResult(False, "output")
        assert "timed out after 1s" in (await attempt("hang")).message


async def test_grpc_is_refused_by_name() -> None:
    result = await try_once({"grpc": {"port": 1}})
    assert result == ProbeResult(False, "grpc probes are not supported by this node agent")
