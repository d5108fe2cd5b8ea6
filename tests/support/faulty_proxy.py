"""A TCP proxy that can fall silent: ``python -m support.faulty_proxy --listen HOST:PORT --target HOST:PORT``.

SIGUSR1: whatever is open now passes nothing on any more and stays open, as behind a firewall that
forgot it; what is opened later works. SIGUSR2: whatever is open now is cut. SIGSTOP and SIGCONT, which
need no help from here, hold up everything and let it go on. Knows nothing of what it carries.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal

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
                connection.copy(reader, far_writer), connection.copy(far_reader, writer)
            )
        except OSError:
            # A reset of one side is the end of the connection for the other.
            pass
        finally:
            self._connections.discard(connection)
            connection.cut()

    def silence(self) -> None:
        for connection in self._connections:
            connection.silent = True

    def cut(self) -> None:
        for connection in self._connections:
            connection.cut()


class _Connection:
    def __init__(self, writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
        self.silent = False
        self._writers = writers

    async def copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """What comes while it is silent is lost; the end of a side is told even then, for whoever
        gives the connection up shall not leave it here for ever."""
        while data := await reader.read(_BUFFER):
            if not self.silent:
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


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
