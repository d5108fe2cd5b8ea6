"""Whatever bytes come on a connection: no 500, no dead engine, and its place is free again."""

from __future__ import annotations

import gzip
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_engine.server import service as service_module
from plimsoll_engine.server.body import BodyBounds
from plimsoll_engine.server.connections import ConnectionBounds
from plimsoll_engine.server.protocol import MAX_BODY_PARTS, parse_request
from support.engine_server import ApiServer, Pace, api_server
from support.fuzzing import fuzz_settings

SOON = 0.2
BODY_BOUNDS = BodyBounds(piece_seconds=SOON, whole_seconds=4 * SOON)
CONNECTION_BOUNDS = ConnectionBounds(
    head_seconds=SOON, idle_seconds=1, stalled_seconds=SOON, most=64
)
SMALL = b'{"model": "m", "prompt": "hi", "max_tokens": 2}'


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with api_server(
        max_model_len=64, body_bounds=BODY_BOUNDS, connection_bounds=CONNECTION_BOUNDS
    ) as running:
        yield running


def connect(server: ApiServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def exchange(server: ApiServer, *pieces: bytes, end: bool = False) -> bytes:
    """What comes back until the server closes; ``end`` closes our half behind the last piece."""
    with closing(connect(server)) as connection:
        answer = b""
        try:
            for piece in pieces:
                connection.sendall(piece)
            if end:
                # The server may have closed already.
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)
            while received := connection.recv(1 << 16):
                answer += received
        except (ConnectionError, BrokenPipeError):
            pass
    return answer


def statuses(answer: bytes) -> list[int]:
    return [int(piece[:3]) for piece in answer.split(b"HTTP/1.1 ")[1:]]


def assert_unharmed(server: ApiServer) -> None:
    assert server.core.failure is None
    assert server.complete(prompt="hi", max_tokens=2)["usage"]["completion_tokens"] == 2
    assert server.client.get("/health").status_code == 200


def post(body: bytes, *headers: bytes, path: bytes = b"/v1/completions") -> bytes:
    lines = [b"POST %s HTTP/1.1" % path, b"Host: h", b"Content-Type: application/json", *headers]
    if not any(header.lower().startswith((b"content-length", b"transfer-")) for header in headers):
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


CLOSE = b"Connection: close"
# Name, what is sent, and the status of each answer (empty: the connection just ends).
SCENARIOS: dict[str, tuple[list[bytes], list[int]]] = {
    "nothing": ([b""], [408]),
    "half a head": ([b"POST /v1/completions HTT"], [408]),
    "a head without an end": ([b"GET /health HTTP/1.1\r\nHost: h\r\nA: b\r\n"], [408]),
    "no body": ([post(b"", b"Content-Length: 50")], [408]),
    "half a body": ([post(b'{"model": "m"', b"Content-Length: 50")], [408]),
    # The rest may be the start of a next head, and has the time of one.
    "more body than was said": ([post(SMALL, b"Content-Length: 10")], [400]),
    "a negative length": ([post(SMALL, b"Content-Length: -1")], [400]),
    "a length that is none": ([post(SMALL, b"Content-Length: many")], [400]),
    "a length of a thousand digits": ([post(b"", b"Content-Length: " + b"9" * 1000)], [400]),
    "two lengths": ([post(SMALL, b"Content-Length: 3", b"Content-Length: 4")], [400]),
    "a length beyond the bound": ([post(b"", b"Content-Length: 99999999999")], [413]),
    "length and chunks": (
        [post(b"0\r\n\r\n", b"Content-Length: 3", b"Transfer-Encoding: chunked", CLOSE)],
        [400],
    ),
    "chunks cut off": ([post(b"10\r\nabc", b"Transfer-Encoding: chunked")], [408]),
    "a chunk's size that is none": ([post(b"zz\r\nabc", b"Transfer-Encoding: chunked")], [400]),
    "an unknown transfer encoding": ([post(SMALL, b"Transfer-Encoding: gzip")], [400]),
    "a head of 100 KiB": ([b"GET /health HTTP/1.1\r\nHost: h\r\nA: " + b"a" * 100_000], [400]),
    "5000 headers": (
        [b"GET /health HTTP/1.1\r\nHost: h\r\n" + b"a: b\r\n" * 5000 + CLOSE + b"\r\n\r\n"],
        [200],
    ),
    "headers without an end": (
        [b"GET /health HTTP/1.1\r\nHost: h\r\n" + b"a: b\r\n" * 12_000],
        [400],
    ),
    "a header with a zero byte": ([b"GET /health HTTP/1.1\r\nHost: h\r\na: \0\r\n\r\n"], [400]),
    "no host": ([b"GET /health HTTP/1.1\r\n\r\n"], [400]),
    "a host that is none": (
        [b"GET /nowhere HTTP/1.1\r\nHost: [\r\nConnection: close\r\n\r\n"],
        [404],
    ),
    "a path that is not UTF-8": (
        [b"GET /%ff%00%0a HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"],
        [404],
    ),
    "TLS": ([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256))], [400]),
    # Its first line reads as a request for a path that is not here.
    "HTTP/2": ([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], [404, 400]),
    "a websocket": (
        [
            b"GET /v1/models HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
        ],
        [200],
    ),
    "three requests at once": ([post(SMALL) + post(SMALL) + post(SMALL, CLOSE)], [200, 200, 200]),
    "a request and half of one": ([post(SMALL) + post(SMALL)[:40]], [200]),
    "a request and bytes that are none": ([post(SMALL) + b"\0\0\0\0\r\n\r\n"], [200, 400]),
    "gzip": ([post(gzip.compress(SMALL), b"Content-Encoding: gzip", CLOSE)], [415]),
    "a body for GET": (
        [b"GET /health HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc"],
        [200],
    ),
    "an id that is too long": ([post(SMALL, b"X-Request-Id: " + b"a" * 300, CLOSE)], [400]),
    "an id that is not ASCII": ([post(SMALL, b"X-Request-Id: \xff\xfe", CLOSE)], [200]),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_bytes_that_are_no_good_request(server: ApiServer, scenario: str) -> None:
    pieces, expected = SCENARIOS[scenario]
    answer = exchange(server, *pieces)
    assert statuses(answer) == expected, answer[:500]
    for status, body in zip(statuses(answer), answer.split(b"\r\n\r\n")[1:], strict=False):
        if status >= 400:
            assert b'"error":{"message"' in body, body
    assert_unharmed(server)


BODIES: dict[str, tuple[bytes, int]] = {
    "not UTF-8": (b'{"prompt": "\xff"}', 400),
    "not UTF-8 where nobody looks": (b'{"prompt": "hi", "x": "\xff"}', 400),
    "UTF-16": ('{"prompt": "hi"}'.encode("utf-16"), 400),
    "half a surrogate pair": (b'{"prompt": "\\ud800"}', 400),
    "a surrogate pair": (b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1}', 200),
    "NaN": (b'{"prompt": "hi", "temperature": NaN}', 400),
    "Infinity": (b'{"prompt": "hi", "temperature": Infinity}', 400),
    "1e999": (b'{"prompt": "hi", "temperature": 1e999}', 400),
    "an integer of 5000 digits": (b'{"prompt": "hi", "seed": %s}' % (b"9" * 5000), 400),
    "token id of 5000 digits": (b'{"prompt": [%s]}' % (b"9" * 5000), 400),
    "the same key twice": (b'{"prompt": 5, "prompt": "hi", "max_tokens": 1}', 400),
    "nested 100,000 deep": (b'{"prompt": "hi", "x": ' + b"[" * 100_000, 400),
    "nested where it is kept": (b'{"prompt": "hi", "response_format": ' + b'{"a":' * 5000, 400),
    "a million parts": (b'{"prompt": "hi", "x": [' + b"[]," * MAX_BODY_PARTS + b"1]}", 413),
    "a zero byte": (b'{"prompt": "hi"}\0', 400),
    "two documents": (b'{"prompt": "hi"}{"prompt": "hi"}', 400),
    "a text of zero bytes": (b'{"prompt": "\\u0000\\u0000", "max_tokens": 1}', 200),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_are_no_good_json(server: ApiServer, name: str) -> None:
    body, status = BODIES[name]
    answer = exchange(server, post(body, CLOSE))
    assert statuses(answer) == [status], answer[:500]
    assert_unharmed(server)


# Lines and pieces of requests, good and bad, in any order.
FRAGMENTS = [
    *(
        b"POST /v1/completions HTTP/1.1\r\n",
        b"GET /health HTTP/1.1\r\n",
        b"POST /tokenize HTTP/1.0\r\n",
    ),
    *(
        b"Host: h\r\n",
        b"Content-Length: 47\r\n",
        b"Content-Length: 0\r\n",
        b"Connection: close\r\n",
    ),
    *(
        b"Transfer-Encoding: chunked\r\n",
        b"Expect: 100-continue\r\n",
        b"Content-Encoding: gzip\r\n",
    ),
    *(
        b"\r\n",
        b"\r\n\r\n",
        SMALL,
        b"2f\r\n" + SMALL + b"\r\n0\r\n\r\n",
        b"0\r\n\r\n",
        b"{",
        b"\0",
        b":",
    ),
]


@fuzz_settings(150)
@given(pieces=st.lists(st.sampled_from(FRAGMENTS) | st.binary(max_size=64), max_size=12))
def test_any_bytes_leave_the_engine_as_it_was(server: ApiServer, pieces: list[bytes]) -> None:
    answer = exchange(server, *pieces, end=True)
    assert not [status for status in statuses(answer) if status >= 500], answer
    assert server.core.failure is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
FIELDS = [
    *("prompt", "messages", "n", "stop", "logprobs", "top_logprobs", "echo", "logit_bias", "seed"),
    *("max_tokens", "stream", "stream_options", "response_format", "structured_outputs", "tokens"),
    *("guided_json", "guided_choice", "chat_template_kwargs", "truncate_prompt_tokens", "model"),
    *(
        "prompt_logprobs",
        "tools",
        "request_id",
        "cache_salt",
        "priority",
        "min_tokens",
        "stop_token_ids",
    ),
]
PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]


@fuzz_settings(300)
@given(
    path=st.sampled_from(PATHS),
    fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6),
    good=st.booleans(),
)
def test_any_json_is_answered_below_500(
    server: ApiServer, path: str, fields: dict[str, Any], good: bool
) -> None:
    base = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    body = json.dumps((base if good else {}) | fields).encode("utf-8", "surrogatepass")
    response = server.client.post(path, content=body)
    assert response.status_code < 500, (fields, response.text)
    assert server.core.failure is None


def test_a_body_that_comes_byte_by_byte_holds_its_place_for_so_long_only(server: ApiServer) -> None:
    with closing(connect(server)) as connection:
        connection.sendall(post(b"", b"Content-Length: 1000000"))
        begun = time.monotonic()
        answer = b""
        # Each byte comes in time, the whole never does.
        connection.settimeout(SOON / 4)
        while not answer and time.monotonic() < begun + 20:
            connection.sendall(b" ")
            try:
                answer = connection.recv(1 << 16)
            except TimeoutError:
                continue
    assert statuses(answer) == [408]
    assert_unharmed(server)


def test_a_new_connection_gets_the_place_of_the_one_idle_longest() -> None:
    bounds = ConnectionBounds(most=4)
    with api_server(max_model_len=64, connection_bounds=bounds) as server:
        server.client.close()
        holders = [connect(server) for _ in range(12)]
        try:
            for _ in range(3):
                request = b"GET /health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
                assert statuses(exchange(server, request)) == [200]
            # The first ones have lost their places.
            assert holders[0].recv(10) == b""
        finally:
            for holder in holders:
                holder.close()


def test_when_every_place_has_a_request_a_new_one_is_told_to_come_again() -> None:
    pace = Pace(20)
    bounds = ConnectionBounds(most=2)
    with api_server(max_model_len=64, connection_bounds=bounds, before_step=pace) as server:
        server.client.close()
        busy = [connect(server) for _ in range(2)]
        try:
            for connection in busy:
                connection.sendall(post(SMALL, CLOSE))
            wait_for(lambda: server.service.load == 2)
            answer = exchange(server)
            assert statuses(answer) == [503]
            assert b"retry-after: 1" in answer.lower()
            pace.release()
            for connection in busy:
                assert statuses(connection.recv(1 << 16)) == [200]
        finally:
            pace.release()
            for connection in busy:
                connection.close()


def test_a_client_that_takes_nothing_is_dropped(server: ApiServer) -> None:
    with closing(socket.socket()) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        connection.settimeout(20)
        # Answers to more than all buffers hold are asked for at once, and none is read. A server
        # that waited would let the sending wait too: TimeoutError.
        requests = b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n" * 1_000_000
        with pytest.raises(ConnectionError):
            connection.sendall(requests)
    assert_unharmed(server)


def test_memory_stays_flat_under_bad_clients(server: ApiServer) -> None:
    def attack() -> None:
        exchange(server, post(b'{"x": [' + b"[]," * 100_000, CLOSE))
        exchange(server, post(b'{"prompt": "' + b"a" * (1 << 20), CLOSE))
        with closing(connect(server)) as gone:
            gone.sendall(post(b"1" * 1000, b"Content-Length: 30000000"))
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    for _ in range(10):
        attack()
    before = resident_bytes()
    for _ in range(60):
        attack()
    assert resident_bytes() - before < 16 << 20
    assert_unharmed(server)


def test_a_large_body_is_read_in_a_worker(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on the event loop, where all streams and probes would wait for it."""
    threads = []

    def read(body: bytes, kind: type[Any]) -> Any:
        threads.append(threading.current_thread().name)
        return parse_request(body, kind)

    monkeypatch.setattr(service_module, "parse_request", read)
    response = server.post("/v1/completions", prompt="a" * 100_000)
    assert response.status_code == 400
    (name,) = threads
    assert name.startswith("tokenizer")


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def wait_for(condition: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
