"""A TCP proxy that can fall silent: ``python -m support.faulty_proxy --listen HOST:PORT --target HOST:PORT``.

SIGUSR1: every connection on which the client has said nothing for QUIET_SECONDS passes nothing on any more and
stays open, as behind a firewall that forgot it: so a watch is told from a connection that is asked again and
again; prints how many are silent. SIGUSR2: whatever is open now is cut. SIGSTOP and SIGCONT, which need no help from here, hold up
everything and let it go on. Knows nothing of what it carries.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import time

# A client gives a connection that it does not use up after 15 s (aiohttp).
QUIET_SECONDS = 16.0
_BUFFER = 64 * 1024


class FaultyProxy:
    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._connections: set[_Connection] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        connection = _Connection((writer, far_writer))
        self._connections.add(connection)
        try:
            await asyncio.gather(
                connection.ask(reader, far_writer), connection.answer(far_reader, writer)
            )
        except OSError:
            # A reset of one side is the end of the connection for the other.
            pass
        finally:
            self._connections.discard(connection)
            connection.cut()

    def silence(self) -> None:
        now = time.monotonic()
        for connection in self._connections:
            connection.silent |= now - connection.asked_at >= QUIET_SECONDS
        print(sum(each.silent for each in self._connections), flush=True)

    def cut(self) -> None:
        for connection in self._connections:
            connection.cut()


class _Connection:
    """What comes while it is silent is lost; the end of a side is told even then, for whoever gives the
    connection up shall not leave it here for ever."""

    def __init__(self, writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
        self.silent = False
        self.asked_at = time.monotonic()
        self._writers = writers

    async def ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_BUFFER):
            self.asked_at = time.monotonic()
            await self._pass(data, writer)
        _end(writer)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_BUFFER):
            await self._pass(data, writer)
        _end(writer)

    async def _pass(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        if not self.silent:
            writer.write(data)
            await writer.drain()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


def _end(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.write_eof()


async def serve(listen: tuple[str, int], target: tuple[str, int]) -> None:
    proxy = FaultyProxy(*target)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, proxy.silence)
    loop.add_signal_handler(signal.SIGUSR2, proxy.cut)
    async with await asyncio.start_server(proxy.accept, *listen) as server:
        print("listening", flush=True)
        await server.serve_forever()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", type=_address, required=True)
    parser.add_argument("--target", type=_address, required=True)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.listen, arguments.target))


if __name__ == "__main__":
    main()
