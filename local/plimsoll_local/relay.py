"""Bytes between the world outside and addresses inside the cluster's namespace.

Inside, a unix socket (a file, so it is reachable from both sides) takes one line
``CONNECT host:port``, answers ``OK`` or ``ERROR reason``, and passes bytes both ways. Outside, a
listener on a loopback port does so for one fixed target. Knows nothing of HTTP or Kubernetes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

_BUFFER = 64 * 1024
# The kernel's limit on the path of a unix socket.
MAX_SOCKET_PATH = 107

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def serve_inside(path: Path) -> asyncio.Server:
    """Serves CONNECT on the unix socket ``path``; runs until the server is closed."""
    path.unlink(missing_ok=True)  # noqa: ASYNC240 - once, before anything is served
    return await asyncio.start_unix_server(keep_tasks(_accept_inside), path=str(path))


def keep_tasks(handle: Handler) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
    """``handle`` as the callback of a server, its tasks held until they are done.

    asyncio itself holds the task of a connection only through that connection's transport, and the
    loop holds that no longer while reading from it is paused. A task that meanwhile waits for
    another connection, whose protocol knows its reader by a weak reference, would be collected.
    """
    tasks: set[asyncio.Future[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(handle(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    return accept


async def _accept_inside(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        line = (await asyncio.wait_for(reader.readline(), 10)).decode().strip()
        verb, _, target = line.partition(" ")
        host, _, port = target.rpartition(":")
        if verb != "CONNECT" or not host or not port.isdigit():
            writer.write(f"ERROR expected 'CONNECT host:port', got {line!r}\n".encode())
            return
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        writer.write(b"OK\n")
        await join(reader, writer, there_reader, there_writer)
    except (OSError, TimeoutError) as error:
        writer.write(f"ERROR {error}\n".encode())
    finally:
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()


async def join(
    near_reader: asyncio.StreamReader,
    near_writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Copies both ways until both sides have ended or one has broken; closes the far side."""
    try:
        await asyncio.gather(_copy(near_reader, far_writer), _copy(far_reader, near_writer))
    except OSError:
        # A reset of one side is the end of the connection for the other.
        pass
    finally:
        far_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_BUFFER):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        with contextlib.suppress(OSError):
            writer.write_eof()


async def serve_outside(path: Path, target: str, listener: socket.socket) -> asyncio.Server:
    """Passes what connects to ``listener`` to ``target`` inside, through the socket ``path``."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(str(path))
            far_writer.write(f"CONNECT {target}\n".encode())
            answer = await far_reader.readline()
            if answer == b"OK\n":
                await join(reader, writer, far_reader, far_writer)
            else:
                far_writer.close()
        except OSError:
            # Nobody listens inside: the client sees a closed connection, as with a dead server.
            pass
        except asyncio.CancelledError:
            # The server ends with this connection open. Passed on, asyncio 3.11 prints it as an error.
            pass
        finally:
            writer.close()

    return await asyncio.start_server(keep_tasks(accept), sock=listener)


def listen_on_loopback(port: int = 0) -> socket.socket:
    """Raises OSError when the port is not to be had."""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def forward(path: Path, target: str, port: int = 0) -> Iterator[int]:
    """A loopback port of this process that leads to ``target`` inside, served by a thread."""
    listener = listen_on_loopback(port)
    loop = asyncio.new_event_loop()
    serving = threading.Event()

    stop = asyncio.Event()

    async def serve() -> None:
        server = await serve_outside(path, target, listener)
        serving.set()
        await stop.wait()
        # Not waiting for open connections, which may last for ever: they are ended here.
        server.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def run() -> None:
        with contextlib.closing(loop):
            loop.run_until_complete(serve())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    serving.wait()
    try:
        yield int(listener.getsockname()[1])
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
