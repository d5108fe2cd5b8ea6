"""The process tree of one local cluster: who starts whom, and who dies with whom.

Outside, one process forwards a loopback port to the API server and waits. Its child makes the
namespaces (namespace.py); pid 1 in there starts the control plane, the Services' proxy and the node
agent, and serves the relay. Each is tied to its parent by a signal, so whatever is killed,
everything below it goes, and pid 1 takes its whole namespace along. A cluster whose folder is
removed ends by itself, because nothing could find it any more.

In: the cluster's folder, prepared by cluster.py. Out: a running cluster, its kubeconfig and the
name of its pid namespace in that folder (layout.py). It imports no client library: it lives as long
as the cluster, and the programs that need one are processes of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from plimsoll_local.binaries import find_binaries
from plimsoll_local.controlplane import (
    ControlPlane,
    ControlPlaneFailed,
    Endpoint,
    render_kubeconfig,
)
from plimsoll_local.layout import (
    API_PORT,
    IMAGES,
    KUBECONFIG,
    NAMESPACE_RECORD,
    NODE_ADDRESS,
    NODE_NAME,
    RELAY_SOCKET,
    SUPERVISOR_RECORD,
)
from plimsoll_local.namespace import NamespacesUnavailable, run_isolated
from plimsoll_local.processes import read_state, start_child, tied_to
from plimsoll_local.relay import listen_on_loopback, serve_inside, serve_outside

log = logging.getLogger("plimsoll_local.supervisor")


def main() -> int:
    parser = argparse.ArgumentParser(prog="plimsoll_local.supervisor", description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="the cluster's folder")
    parser.add_argument("--api-server-flag", action="append", default=[], metavar="FLAG")
    arguments = parser.parse_args()
    state, flags = arguments.state, arguments.api_server_flag
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    listener = listen_on_loopback()
    port = int(listener.getsockname()[1])
    parent = os.getpid()
    isolated = os.fork()
    if isolated == 0:
        listener.close()
        tied_to(parent)()
        try:
            os._exit(run_isolated(lambda: _run_inside(state, port, flags)))
        except NamespacesUnavailable as unavailable:
            print(unavailable, file=sys.stderr, flush=True)
            os._exit(3)
    return asyncio.run(_serve_outside(state, listener, isolated))


async def _serve_outside(state: Path, listener: socket.socket, isolated: int) -> int:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def stop() -> None:
        os.kill(isolated, signal.SIGTERM)

    def reap() -> None:
        if ended.done():
            return
        pid, status = os.waitpid(isolated, os.WNOHANG)
        if pid:
            ended.set_result(os.waitstatus_to_exitcode(status))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGCHLD, reap)
    reap()
    server = await serve_outside(state / RELAY_SOCKET, f"{NODE_ADDRESS}:{API_PORT}", listener)
    status = await ended
    server.close()
    return max(status, 0)


def _run_inside(state: Path, outside_port: int, api_server_flags: list[str]) -> int:
    """pid 1. Its end is the end of every process in the namespace, so nothing is stopped by hand:
    the data is thrown away and the node agent has no word to give to an API server that goes too.
    """
    # pid 1 gets no signal that it has no handler for.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    _, started = read_state(1)
    namespace = {"name": os.readlink("/proc/self/ns/pid"), "started": started}
    _write(state / NAMESPACE_RECORD, json.dumps(namespace))
    binaries = find_binaries()
    if binaries is None:
        print("the control plane's programs are gone; `plimsoll-local up` builds them again")
        return 1
    from plimsoll_local.network import create_bridge

    create_bridge()
    plane = ControlPlane(
        state / "controlplane",
        binaries,
        endpoint=Endpoint(bind="0.0.0.0", advertise=NODE_ADDRESS, port=API_PORT),
        api_server_flags=api_server_flags,
    )
    try:
        plane.launch()
        # They load their libraries while the API server starts, and try again until it answers.
        helpers = [
            Helper.start(name, arguments, state) for name, arguments in _helpers(state, plane)
        ]
        plane.complete()
    except ControlPlaneFailed as failed:
        print(failed)
        return 1
    _write(
        state / KUBECONFIG,
        render_kubeconfig(
            f"https://127.0.0.1:{outside_port}", plane.certificate_authority, plane.token
        ),
    )
    return asyncio.run(_serve_inside(state, plane, helpers))


def _helpers(state: Path, plane: ControlPlane) -> list[tuple[str, list[str | Path]]]:
    """Name (of the log file) and arguments of the Python programs beside the control plane."""
    return [
        ("services", ["plimsoll_local.services", "--kubeconfig", plane.kubeconfig]),
        (
            "agent",
            [
                "plimsoll_local.agent",
                "--kubeconfig", plane.kubeconfig,
                "--state", state / "agent",
                "--images", state / IMAGES,
                "--node-name", NODE_NAME,
                "--node-ip", NODE_ADDRESS,
            ],
        ),
    ]  # fmt: skip


@dataclass
class Helper:
    """A Python program that is started again when it ends."""

    name: str
    arguments: list[str | Path]
    log: Path
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, name: str, arguments: list[str | Path], state: Path) -> Helper:
        log_file = state / f"{name}.log"
        return cls(name, arguments, log_file, _start_module(arguments, log_file))

    def keep_running(self) -> None:
        if self.process.poll() is not None:
            log.warning("%s ended with %s; starting it again", self.name, self.process.returncode)
            self.process = _start_module(self.arguments, self.log)


def _start_module(arguments: list[str | Path], log_file: Path) -> subprocess.Popen[bytes]:
    return start_child([sys.executable, "-m", *arguments], log_file)


async def _serve_inside(state: Path, plane: ControlPlane, helpers: list[Helper]) -> int:
    async with await serve_inside(state / RELAY_SOCKET):
        while (state / SUPERVISOR_RECORD).exists():
            failed = plane.failed_component()
            if failed is not None:
                log.error("the cluster ends: %s", failed)
                os._exit(1)
            for helper in helpers:
                helper.keep_running()
            _reap_adopted({*plane.pids, *(helper.process.pid for helper in helpers)})
            await asyncio.sleep(1)
        # Not to be left by the event loop's own clean-up: that would wait for open connections.
        os._exit(0)


def _reap_adopted(own: set[int]) -> None:
    """pid 1 inherits every orphan of its namespace. Children of our own are left to their Popen."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in own:
            return
        os.waitpid(ended.si_pid, 0)


def _write(path: Path, text: str) -> None:
    """Whole or not at all: others wait for this file to appear."""
    draft = path.with_suffix(".draft")
    draft.touch(mode=0o600)
    draft.write_text(text)
    draft.replace(path)


if __name__ == "__main__":
    sys.exit(main())
