"""The gate passes answers on byte for byte, notices who leaves, drains, and tells a bad upstream."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import suppress

import aiohttp
import pytest
from aiohttp import web

from plimsoll_engine.admission import RefusalReason
from plimsoll_engine.gate.app import CHAT, COMPLETION
from support.gate_harness import (
    SECONDS,
    Harness,
    Upstream,
    free_port,
    open_gate,
    raw_server,
    until,
)

SMALL = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 5, "stream": True}
OK = b"HTTP/1.1 200 OK\r\n"


def pieces() -> Iterator[bytes]:
    """Events and halves of events, of all sizes, also not UTF-8."""
    source = random.Random(7)
    for index in range(200):
        yield b'data: {"index": %d}\n\n' % index
        yield source.randbytes(source.choice([1, 7, 1000, 70_000]))
    yield b"data: [DONE]\n\n"


async def test_a_stream_arrives_byte_for_byte_with_status_and_headers() -> None:
    async def send(http: web.Request) -> web.StreamResponse:
        headers = [("X-Twice", "1"), ("X-Twice", "2"), ("Content-Type", "text/event-stream")]
        headers += [("Keep-Alive", "timeout=5"), ("Connection", "X-Private"), ("X-Private", "1")]
        response = web.StreamResponse(status=207, reason="Odd", headers=headers)
        await response.prepare(http)
        for piece in pieces():
            await response.write(piece)
        return response

    async with open_gate(Upstream(send=send)) as harness:
        headers = {"X-Mine": "a", "Connection": "X-Hop", "X-Hop": "1", "x-request-id": "abc"}
        url = harness.url + COMPLETION + "?a=%2F&b=1"
        async with harness.client.post(url, json=SMALL, headers=headers) as answer:
            body = await answer.read()
            assert (answer.status, answer.reason) == (207, "Odd")
            assert answer.headers.getall("X-Twice") == ["1", "2"]
            assert answer.headers["Content-Type"] == "text/event-stream"
            assert "X-Private" not in answer.headers
            assert "Keep-Alive" not in answer.headers
        assert hashlib.sha256(body).digest() == hashlib.sha256(b"".join(pieces())).digest()
        held = await harness.next()
        sent = {name.lower(): value for name, value in held.headers}
        assert (sent["x-mine"], sent["x-request-id"]) == ("a", "abc")
        assert "x-hop" not in sent
        assert sent["host"] != harness.url.removeprefix("http://")
        assert held.body == json.dumps(SMALL).encode()


async def test_a_redirect_is_the_clients_to_follow() -> None:
    async def send(http: web.Request) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": "/health"})

    async with (
        open_gate(Upstream(send=send)) as harness,
        harness.client.post(harness.url + COMPLETION, json=SMALL, allow_redirects=False) as answer,
    ):
        assert (answer.status, answer.headers["Location"]) == (307, "/health")


async def test_each_piece_arrives_before_the_next_is_sent() -> None:
    send_next: asyncio.Queue[bytes] = asyncio.Queue()

    async def send(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(http)
        while piece := await send_next.get():
            await response.write(piece)
        return response

    async with (
        open_gate(Upstream(send=send)) as harness,
        asyncio.timeout(SECONDS),
        harness.client.post(harness.url + COMPLETION, json=SMALL) as answer,
    ):
        for piece in (b"d", b"ata: 1\n", b"\n"):
            send_next.put_nowait(piece)
            assert await answer.content.readany() == piece
        send_next.put_nowait(b"")
        assert await answer.content.read() == b""


async def test_an_answer_of_known_length_and_an_error_pass_as_they_are() -> None:
    packed = gzip.compress(b"odd")

    async def send(http: web.Request) -> web.StreamResponse:
        return web.Response(status=422, body=packed, headers={"Content-Encoding": "gzip"})

    async with (
        open_gate(Upstream(send=send)) as harness,
        aiohttp.ClientSession(auto_decompress=False) as client,
        client.post(harness.url + COMPLETION, json=SMALL) as answer,
    ):
        assert (answer.status, await answer.read()) == (422, packed)
        assert answer.headers["Content-Length"] == str(len(packed))
        assert answer.headers["Content-Encoding"] == "gzip"


async def test_a_client_that_waits_to_be_asked_for_its_body_is_asked() -> None:
    body = json.dumps(SMALL).encode()
    head = f"POST {COMPLETION} HTTP/1.1\r\nHost: m\r\nContent-Length: {len(body)}\r\n"
    async with open_gate() as harness, asyncio.timeout(SECONDS):
        host, port = harness.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{head}Expect: 100-continue\r\n\r\n".encode())
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        held = await harness.next()
        assert held.body == body
        assert "expect" not in {name.lower() for name, _ in held.headers}
        held.answer_json()
        assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
        writer.close()
        await writer.wait_closed()


async def test_a_body_that_is_announced_too_large_is_not_waited_for() -> None:
    head = f"POST {COMPLETION} HTTP/1.1\r\nHost: m\r\nContent-Length: 2001\r\n\r\n"
    async with open_gate(max_body=2000) as harness, asyncio.timeout(SECONDS):
        host, port = harness.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        writer.close()
        await writer.wait_closed()


async def leave(task: asyncio.Task[object]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def until_idle(harness: Harness) -> None:
    await until(lambda: harness.gate.running == harness.gate.waiting == 0)
    assert await harness.gate.drain(0.5)


async def test_a_client_that_leaves_while_it_waits_gives_its_place_in_the_queue_back() -> None:
    async with open_gate(max_num_seqs=1) as harness:
        first = harness.complete([1])
        held = await harness.next()
        second, third = harness.complete([2]), harness.complete([3])
        await until(lambda: harness.gate.waiting == 2)
        await leave(second)
        await until(lambda: harness.gate.waiting == 1)
        held.answer_json()
        await first
        held = await harness.next()
        assert held.document["prompt"] == [3]
        held.answer_json()
        await third
        assert harness.upstream.held.empty()
        await until_idle(harness)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_it_is_served_ends_its_request_upstream(
    stream: bool,
) -> None:
    async with open_gate(max_num_seqs=1) as harness:
        task = harness.complete([1], stream=stream)
        held = await harness.next()
        await leave(task)
        async with asyncio.timeout(SECONDS):
            await held.left.wait()
        await until_idle(harness)


async def test_a_client_that_leaves_in_the_middle_of_a_stream_ends_its_request_upstream() -> None:
    ended = asyncio.Event()

    async def send(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(http)
        await response.write(b"data: 1\n\n")
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return response

    async with open_gate(Upstream(send=send)) as harness:
        answer = await harness.client.post(harness.url + COMPLETION, json=SMALL)
        assert await answer.content.readany() == b"data: 1\n\n"
        answer.close()
        async with asyncio.timeout(SECONDS):
            await ended.wait()
        await until_idle(harness)


async def test_a_client_that_leaves_while_it_is_counted_leaves_nothing_behind() -> None:
    counting, go_on = asyncio.Event(), asyncio.Event()

    class Slow(Upstream):
        async def _tokenize(self, http: web.Request) -> web.Response:
            counting.set()
            await go_on.wait()
            return web.json_response({"count": 1})

    async with open_gate(Slow()) as harness:
        task = harness.complete("x" * 2000)
        async with asyncio.timeout(SECONDS):
            await counting.wait()
        assert not await harness.gate.drain(0)
        harness.gate.draining = False
        await leave(task)
        await until_idle(harness)
        assert harness.upstream.held.empty()
        go_on.set()


async def test_draining_refuses_the_new_and_finishes_the_running_and_the_waiting() -> None:
    async with open_gate(max_num_seqs=1) as harness:
        tasks = [harness.complete([1]), harness.complete([2])]
        await until(lambda: harness.gate.waiting == 1)
        draining = asyncio.create_task(harness.gate.drain(SECONDS))
        await until(lambda: harness.gate.draining)
        status, document = await harness.complete([3])
        assert (status, document["error"]["type"]) == (503, "ServiceUnavailableError")
        for _ in tasks:
            (await harness.next()).answer_json()
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200, 200]
        assert await draining


async def test_a_drain_that_begins_while_a_prompt_is_counted_refuses_it() -> None:
    counting, go_on = asyncio.Event(), asyncio.Event()

    class Slow(Upstream):
        async def _tokenize(self, http: web.Request) -> web.Response:
            counting.set()
            await go_on.wait()
            return web.json_response({"count": 1})

    async with open_gate(Slow(), max_num_seqs=1, max_num_queued_reqs=1) as harness:
        tasks = [harness.complete("x" * 2000), harness.complete("y" * 2000)]
        async with asyncio.timeout(SECONDS):
            await counting.wait()
        await until(lambda: harness.gate._in_hand == 2)
        # Also those that are counted have a bound.
        assert (await harness.complete("z" * 2000))[0] == 429
        assert not await harness.gate.drain(0)
        go_on.set()
        assert [status for status, _ in await asyncio.gather(*tasks)] == [503, 503]
        counting.clear()
        assert (await harness.complete("z" * 2000))[0] == 503
        assert not counting.is_set()


async def test_a_drain_that_takes_too_long_says_so() -> None:
    async with open_gate() as harness:
        task = harness.complete([1])
        held = await harness.next()
        assert not await harness.gate.drain(0)
        held.answer_json()
        await task


async def test_an_upstream_that_is_not_there_is_a_503_and_health_says_so() -> None:
    async with open_gate(at=f"http://127.0.0.1:{free_port()}") as harness:
        status, document = await harness.complete([1])
        assert (status, document["error"]["code"]) == (503, 503)
        status, document = await harness.post("/tokenize", {"prompt": "x"})
        assert status == 503
        assert "cannot be reached" in document["error"]["message"]
        assert harness.gate.refused[RefusalReason.ENGINE_DEAD] == 2
        for path, expected in (("/health", 503), ("/gate/health", 200)):
            async with harness.client.get(harness.url + path) as answer:
                assert answer.status == expected
        async with harness.client.get(harness.url + "/metrics") as answer:
            page = await answer.text()
        assert 'plimsoll:upstream_up{engine="0",model_name=""} 0.0' in page
        assert "max_model_len" not in page


async def test_health_is_the_upstreams_and_the_gates() -> None:
    async with open_gate() as harness:

        async def health() -> int:
            async with harness.client.get(harness.url + "/health") as answer:
                assert await answer.read() == b""
                return answer.status

        assert await health() == 200
        harness.upstream.healthy = False
        assert await health() == 503
        harness.upstream.healthy = True
        harness.app.terminating = True
        assert await health() == 503


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"garbage\r\n\r\n", "gave no answer"),
        (b"", "gave no answer"),
        (OK + b"Content-Length: 9\r\nBad Header\r\n\r\n", "gave no answer"),
        (
            OK + b"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\nzz\r\n",
            "no answer: Invalid character in chunk size.",
        ),
        (OK + b"X: " + b"x" * 100_000 + b"\r\n\r\n", "gave no answer"),
    ],
)
async def test_an_answer_that_is_not_http_is_a_502(answer: bytes, told: str) -> None:
    async with raw_server(answer) as address, open_gate(at=address) as harness:
        status, document = await harness.post("/detokenize", {"tokens": [1]})
        assert (status, document["error"]["type"]) == (502, "InternalServerError")
        assert told in document["error"]["message"]


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Content-Length: 100\r\n\r\nhalf",
        OK + b"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
    ],
)
async def test_an_answer_that_breaks_off_never_looks_whole(answer: bytes) -> None:
    async with raw_server(answer) as address, open_gate(at=address) as harness:
        with pytest.raises(aiohttp.ClientError):
            async with harness.client.post(harness.url + "/detokenize", json={}) as broken:
                await broken.read()


@pytest.mark.parametrize(
    ("answer", "status", "told"),
    [
        (web.Response(status=200, body=b"{"), 502, "did not count"),
        (web.Response(status=200, body=b'{"count": "7"}'), 502, "did not count"),
        (web.Response(status=404, body=b'{"detail": "Not Found"}'), 502, "answered 404"),
        (web.Response(status=500, body=b"oops"), 502, "answered 500"),
        (
            web.Response(
                status=404, body=b'{"error": {"message": "no such model", "param": "model"}}'
            ),
            404,
            "no such model",
        ),
    ],
)
async def test_a_count_that_fails_is_told(answer: web.Response, status: int, told: str) -> None:
    async with open_gate(Upstream(count=lambda asked: answer)) as harness:
        got, document = await harness.complete("x" * 2000)
        assert got == status
        assert told in document["error"]["message"]
        assert harness.upstream.held.empty()


async def test_an_upstream_without_models_admits_nothing() -> None:
    answer = OK + b'Content-Length: 12\r\n\r\n{"data": [1]}'
    async with raw_server(answer) as address, open_gate(at=address) as harness:
        status, document = await harness.complete([1])
        assert status == 503
        assert "does not answer" in document["error"]["message"]


async def test_images_and_tools_are_counted_by_the_upstream() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
    chats = [
        {"messages": [{"role": "user", "content": parts}], "max_tokens": 1},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "tools": [{"a": 1}]},
    ]
    async with open_gate(Upstream(count=lambda asked: 5)) as harness:
        for chat in chats:
            task = asyncio.create_task(harness.post(CHAT, chat))
            (await harness.next()).answer_json()
            assert (await task)[0] == 200
        assert harness.upstream.questions[1]["tools"] == [{"a": 1}]
        assert len(harness.upstream.questions) == 2
