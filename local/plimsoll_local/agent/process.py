"""Containers as running processes: starts them through the shim, signals them, awaits their end.

In: a ContainerSpec and a directory to keep its files in. Out: a :class:`Container` handle, or why
the program could not be started. This module knows nothing of pods or restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from plimsoll_local.agent.container import (
    ContainerSpec,
    ExecResult,
    Exited,
    Started,
    StartFailed,
    report_from_json,
)

_SHIM = ("-m", "plimsoll_local.agent.shim")
# What is kept of the output of a probe or hook.
_MAX_OUTPUT = 16 * 1024


class Container:
    """One running container. ``exited`` is done when its last process has ended."""

    def __init__(self, spec_file: Path, started: Started) -> None:
        self.started_at = started.at
        self.exited: asyncio.Future[Exited] = asyncio.get_running_loop().create_future()
        self._spec_file = spec_file
        self._pid = started.pid
        self._pidfd: int | None = None
        # A short program may have ended by now; its shim will say so.
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(started.pid)

    def signal(self, number: signal.Signals) -> None:
        """Signals the first process; one that has just ended is no error."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    async def execute(self, argv: Sequence[str], seconds: float) -> ExecResult:
        """Runs one more program in the container. Raises TimeoutError after ``seconds``, when the
        program has been killed."""
        if self.exited.done():
            return ExecResult(1, "container is not running")
        arguments = ("exec", "--parent", str(os.getpid()), "--spec", str(self._spec_file))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *(*_SHIM, *arguments, "--pid", str(self._pid), "--", *argv),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(seconds):
                output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
        text = output[:_MAX_OUTPUT].decode(errors="replace")
        return ExecResult(process.returncode or 0, text)

    def finish(self, report: Exited) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        self.exited.set_result(report)


async def start_container(spec: ContainerSpec, directory: Path) -> Container | StartFailed:
    """Starts the program of ``spec``; ``directory`` receives the spec and the shim's own errors."""
    spec_file = directory / "spec.json"
    spec_file.write_text(spec.to_json())
    reports_end, shim_end = os.pipe()
    errors_file = directory / "shim.log"
    arguments = ("run", "--parent", str(os.getpid()), "--spec", str(spec_file))
    try:
        with errors_file.open("ab") as errors:
            # The kernel ties the shim to the thread that starts it: the event loop's.
            shim = await asyncio.create_subprocess_exec(
                sys.executable,
                *(*_SHIM, *arguments, "--reports", str(shim_end)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=(shim_end,),
            )
    finally:
        os.close(shim_end)
    reports = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reports), os.fdopen(reports_end, "rb", 0)
    )
    line = await reports.readline()
    report = report_from_json(line) if line else None
    if not isinstance(report, Started):
        await shim.wait()
        if isinstance(report, StartFailed):
            return report
        return StartFailed(f"container shim failed: {_last_line(errors_file)}", time.time())
    container = Container(spec_file, report)
    task = asyncio.create_task(_await_exit(container, shim, reports))
    _watchers.add(task)
    task.add_done_callback(_watchers.discard)
    return container


# A task that nothing refers to may be collected before it is done.
_watchers: set[asyncio.Task[None]] = set()


async def _await_exit(
    container: Container, shim: asyncio.subprocess.Process, reports: asyncio.StreamReader
) -> None:
    line = await reports.readline()
    report = report_from_json(line) if line else None
    await shim.wait()
    if not isinstance(report, Exited):
        # The shim was killed, and its container with it.
        report = Exited(128 + signal.SIGKILL, False, 0, time.time())
    container.finish(report)


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()
    return lines[-1] if lines else "no message"
