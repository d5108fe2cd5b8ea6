"""The relay between two event loops' worlds, on loopback: the namespace adds nothing to it."""

import asyncio
import gc
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from plimsoll_local.relay import forward, listen_on_loopback, serve_inside


@asynccontextmanager
async def shouting_server() -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Reads to the end first: half-closed connections must pass.
        writer.write((await reader.read()).upper())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield int(server.sockets[0].getsockname()[1])


async def exchange(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


async def test_bytes_pass_both_ways_with_half_close(tmp_path: Path) -> None:
    path = tmp_path / "relay.sock"
    data = b"x" * 1_000_000
    async with shouting_server() as target, await serve_inside(path):
        with forward(path, f"127.0.0.1:{target}") as port:
            assert await exchange(port, data) == data.upper()


async def test_a_connection_outlives_collections_while_it_waits_for_the_inside(
    tmp_path: Path,
) -> None:
    """More than the relay buffers is sent before the inside says OK: reading is paused then."""
    path = tmp_path / "relay.sock"
    data = b"x" * 20_000_000
    stuck = asyncio.Event()

    async def inside(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        await stuck.wait()
        gc.collect()
        writer.write(b"OK\n")
        writer.write((await reader.read()).upper())
        await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(inside, path=str(path)):
        with forward(path, "10.0.0.1:80") as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            # Until the bytes fit nowhere more, so that the relay has stopped reading.
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(writer.drain(), 1)
            stuck.set()
            writer.write_eof()
            answer = await reader.read()
            writer.close()
    assert answer == data.upper()


async def test_a_dead_target_closes_the_connection(tmp_path: Path) -> None:
    path = tmp_path / "relay.sock"
    closed = listen_on_loopback()
    target = closed.getsockname()[1]
    closed.close()
    async with await serve_inside(path):
        with forward(path, f"127.0.0.1:{target}") as port:
            assert await exchange(port, b"hello") == b""


async def test_a_bad_first_line_is_answered_with_what_is_expected(tmp_path: Path) -> None:
    path = tmp_path / "relay.sock"
    async with await serve_inside(path):
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(b"GET / HTTP/1.1\n")
        answer = await reader.read()
        writer.close()
    assert answer == b"ERROR expected 'CONNECT host:port', got 'GET / HTTP/1.1'\n"


def test_a_forward_leaves_no_listener(tmp_path: Path) -> None:
    with forward(tmp_path / "relay.sock", "10.0.0.1:80") as port:
        pass
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
