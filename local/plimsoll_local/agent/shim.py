"""The small process that stands between the agent and one container.

``run``: reads a ContainerSpec from a file, starts the program in namespaces of its own, copies its
output into the log, keeps its memory limit, and writes one Report per line to a descriptor.
``exec``: runs one more program inside a running container, for probes and hooks.

If the agent dies the kernel kills the shim, and with the shim the container's first process, and
with that every process in its pid namespace: nothing is left. Standard library only; it knows
nothing of Kubernetes. A program that is the first process of a pid namespace ignores signals it has
no handler for, SIGTERM too, exactly as in any container.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from plimsoll_local.agent.container import (
    ContainerSpec,
    Exited,
    Report,
    Started,
    StartFailed,
    report_to_json,
)
from plimsoll_local.agent.linux import (
    Namespace,
    enter,
    set_death_signal,
    set_host_name,
    unshare,
)
from plimsoll_local.agent.logs import LineWriter
from plimsoll_local.agent.memory import MIN_INTERVAL, MemoryMeter, poll_interval
from plimsoll_local.agent.rootfs import enter_root

# What a runtime reports when the program never ran.
START_FAILED_STATUS = 128


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="plimsoll_local.agent.shim")
    modes = parser.add_subparsers(dest="mode", required=True)
    run = modes.add_parser("run")
    run.add_argument("--reports", type=int, required=True, help="descriptor for the reports")
    execute = modes.add_parser("exec")
    execute.add_argument("--pid", type=int, required=True)
    execute.add_argument("argv", nargs="+")
    for mode in (run, execute):
        mode.add_argument("--spec", required=True)
        mode.add_argument("--parent", type=int, required=True, help="die with this process")
    options = parser.parse_args(arguments)

    set_death_signal(signal.SIGKILL)
    if os.getppid() != options.parent:
        return 1  # it ended before the kernel was told to watch it
    with open(options.spec) as file:
        spec = ContainerSpec.from_json(file.read())
    if options.mode == "exec":
        return execute_in(spec, options.pid, options.argv)
    with os.fdopen(options.reports, "w", buffering=1) as reports:
        os.set_inheritable(options.reports, False)
        return run_container(spec, lambda report: print(report_to_json(report), file=reports))


def run_container(spec: ContainerSpec, report: Callable[[Report], object]) -> int:
    """Runs the container to its end; returns its exit code."""
    unshare(Namespace.PID)
    output, output_end = os.pipe()
    errors, errors_end = os.pipe()
    failure, failure_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become_program(
            lambda: _isolate(spec), spec.argv, dict(spec.env), failure_end, output_end, errors_end
        )
    for descriptor in (output_end, errors_end, failure_end):
        os.close(descriptor)
    # Closed by a successful exec; else it carries the reason.
    with os.fdopen(failure, "rb") as reader:
        reason = reader.read().decode(errors="replace")
    if reason:
        os.waitpid(pid, 0)
        report(StartFailed(reason, time.time()))
        return START_FAILED_STATUS
    report(Started(pid, time.time()))
    ended = _supervise(spec, pid, output, errors)
    report(ended)
    return ended.exit_code


def _isolate(spec: ContainerSpec) -> None:
    if spec.network_namespace is not None:
        descriptor = os.open(spec.network_namespace, os.O_RDONLY | os.O_CLOEXEC)
        enter(descriptor, Namespace.NETWORK)
        os.close(descriptor)
    unshare(Namespace.MOUNT | Namespace.UTS | Namespace.IPC)
    set_host_name(spec.host_name)
    enter_root(spec)


def _become_program(
    isolate: Callable[[], None],
    argv: tuple[str, ...],
    env: dict[str, str],
    failure: int,
    output: int | None = None,
    errors: int | None = None,
) -> NoReturn:
    """In the child: isolates itself and becomes the program, or writes why not and ends."""
    try:
        set_death_signal(signal.SIGKILL)
        os.setsid()
        isolate()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        if output is not None and errors is not None:
            os.dup2(output, 1)
            os.dup2(errors, 2)
        # Python ignores these two, and a program would inherit that.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        try:
            os.execvpe(argv[0], argv, env)
        except FileNotFoundError:
            raise FileNotFoundError(f'exec: "{argv[0]}": executable file not found') from None
    except Exception as error:  # noqa: BLE001 - whatever it was, the agent must be told
        os.write(failure, (str(error) or type(error).__name__).encode())
    finally:
        os._exit(START_FAILED_STATUS)


def _supervise(spec: ContainerSpec, pid: int, output: int, errors: int) -> Exited:
    """Copies output and keeps the memory limit until the program has ended."""
    process = os.pidfd_open(pid)
    guard = _MemoryGuard(spec, pid, process)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(spec.log_file, "ab", buffering=0))
        selector = stack.enter_context(selectors.DefaultSelector())
        writers = {
            output: LineWriter(log, "stdout", time.time),
            errors: LineWriter(log, "stderr", time.time),
        }
        for descriptor in (output, errors, process):
            selector.register(descriptor, selectors.EVENT_READ)
        running = True
        while running or writers:
            for key, _ in selector.select(guard.look() if running else None):
                if key.fd == process:
                    # The pid namespace is empty now, so both pipes end by themselves.
                    running = False
                    selector.unregister(process)
                elif data := os.read(key.fd, 1 << 16):
                    writers[key.fd].write(data)
                else:
                    writers.pop(key.fd).flush()
                    selector.unregister(key.fd)
        _, status = os.waitpid(pid, 0)
    return Exited(_exit_code(status), guard.killed, guard.peak, time.time())


class _MemoryGuard:
    """Looks at a container's memory when it is time to, and kills it when it is over its limit."""

    def __init__(self, spec: ContainerSpec, pid: int, process: int) -> None:
        self.killed = False
        self.peak = 0
        self._limit = spec.memory_limit
        self._process = process
        self._meter: MemoryMeter | None = None
        self._look_at = time.monotonic()
        if self._limit is not None:
            # Absent when the program has ended already.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                self._meter = MemoryMeter(pid, spec.shared_memory)

    def look(self) -> float | None:
        """Looks if it is time; returns the seconds until the next look, None for never."""
        if self._meter is None or self._limit is None or self.killed:
            return None
        now = time.monotonic()
        if now >= self._look_at:
            try:
                used = self._meter.used(self._limit)
            except (FileNotFoundError, ProcessLookupError):
                return MIN_INTERVAL  # it is just ending
            self.peak = max(self.peak, used)
            if used > self._limit:
                self.killed = True
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
                return None
            self._look_at = now + poll_interval(used, self._limit)
        return max(0.0, self._look_at - now)


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def execute_in(spec: ContainerSpec, pid: int, argv: list[str]) -> int:
    """Runs ``argv`` in the container whose first process is ``pid``; returns its exit code.
    Output goes to this process's own stdout and stderr."""
    container = os.pidfd_open(pid)
    enter(
        container,
        Namespace.NETWORK | Namespace.UTS | Namespace.IPC | Namespace.PID | Namespace.MOUNT,
    )
    failure, failure_end = os.pipe()
    child = os.fork()
    if child == 0:
        _become_program(
            lambda: os.chdir(spec.working_directory), tuple(argv), dict(spec.env), failure_end
        )
    # Ended early, the shim still has to reap the program: as a zombie nobody waits for it would
    # keep the container's pid namespace, and so the container, from ending.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    os.close(failure_end)
    with os.fdopen(failure, "rb") as reader:
        reason = reader.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    if reason:
        print(reason, file=sys.stderr)
        # As a shell says it, and as an exec through a runtime ends.
        return 126 if "Permission" in reason else 127
    return _exit_code(status)


if __name__ == "__main__":
    sys.exit(main())
