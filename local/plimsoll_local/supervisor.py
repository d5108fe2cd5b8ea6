"""The process tree of one local cluster: who starts whom, and who dies with whom.

Outside, one process forwards a loopback port to the API server and waits. Its child makes the
namespaces (namespace.py); pid 1 in there starts the control plane and the node agent and serves the
Services and the relay. Each is tied to its parent by a signal, so whatever is killed, everything
below it goes, and pid 1 takes its whole namespace along.

In: the cluster's folder, prepared by cluster.py. Out: a running cluster, ``kubeconfig`` and
``namespace`` (the name of the pid namespace) in that folder.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

from kubernetes.aio import client
from kubernetes.aio.config import load_kube_config

from plimsoll_local.binaries import find_binaries
from plimsoll_local.controlplane import ControlPlane, Endpoint, render_kubeconfig
from plimsoll_local.namespace import NamespacesUnavailable, run_isolated
from plimsoll_local.network import NODE_ADDRESS, create_bridge
from plimsoll_local.processes import start_child, tied_to
from plimsoll_local.relay import listen_on_loopback, serve_inside, serve_outside
from plimsoll_local.services import ServiceProxy

NODE_NAME = "plimsoll-local"
API_PORT = 6443
RELAY_SOCKET = "relay.sock"

log = logging.getLogger("plimsoll_local.supervisor")


def main() -> int:
    parser = argparse.ArgumentParser(prog="plimsoll_local.supervisor")
    parser.add_argument("--state", type=Path, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    listener = listen_on_loopback()
    port = int(listener.getsockname()[1])
    parent = os.getpid()
    isolated = os.fork()
    if isolated == 0:
        listener.close()
        tied_to(parent)()
        try:
            os._exit(run_isolated(lambda: _run_inside(arguments.state, port)))
        except NamespacesUnavailable as unavailable:
            print(unavailable, file=sys.stderr, flush=True)
            os._exit(3)
    return asyncio.run(_serve_outside(arguments.state, listener, isolated))


async def _serve_outside(state: Path, listener: object, isolated: int) -> int:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def stop() -> None:
        os.kill(isolated, signal.SIGTERM)

    def reap() -> None:
        pid, status = os.waitpid(isolated, os.WNOHANG)
        if pid and not ended.done():
            ended.set_result(os.waitstatus_to_exitcode(status))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGCHLD, reap)
    reap()
    target = f"{NODE_ADDRESS}:{API_PORT}"
    server = await serve_outside(state / RELAY_SOCKET, target, listener)  # type: ignore[arg-type]
    status = await ended
    server.close()
    return max(status, 0)


def _run_inside(state: Path, outside_port: int) -> int:
    # pid 1 gets no signal that it has no handler for.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    binaries = find_binaries()
    if binaries is None:
        print("the control plane's binaries are gone; run `make demo` or `plimsoll-local up`")
        return 1
    create_bridge()
    plane = ControlPlane(
        state / "controlplane",
        binaries,
        endpoint=Endpoint(bind="0.0.0.0", advertise=NODE_ADDRESS, port=API_PORT),
    )
    plane.start()
    _write(
        state / "kubeconfig",
        render_kubeconfig(
            f"https://127.0.0.1:{outside_port}", plane.certificate_authority, plane.token
        ),
    )
    _write(state / "namespace", os.readlink("/proc/self/ns/pid"))
    return asyncio.run(_serve_inside(state, plane))


async def _serve_inside(state: Path, plane: ControlPlane) -> int:
    configuration = client.Configuration()
    await load_kube_config(str(plane.kubeconfig), client_configuration=configuration)
    async with client.ApiClient(configuration) as api:
        relay = await serve_inside(state / RELAY_SOCKET)
        async with relay, asyncio.TaskGroup() as tasks:
            tasks.create_task(ServiceProxy(api).run())
            tasks.create_task(_keep_running(state, plane))
    return 1


async def _keep_running(state: Path, plane: ControlPlane) -> None:
    """Starts the node agent again when it ends; ends everything when the control plane does."""
    agent = _start_agent(state, plane)
    while True:
        failed = plane.failed_component()
        if failed is not None:
            log.error("the cluster ends: %s", failed)
            os._exit(1)
        if agent.poll() is not None:
            log.warning("the node agent ended with status %s; starting it again", agent.returncode)
            agent = _start_agent(state, plane)
        _reap_adopted({agent.pid, *plane.pids})
        await asyncio.sleep(1)


def _start_agent(state: Path, plane: ControlPlane) -> subprocess.Popen[bytes]:
    return start_child(
        [
            sys.executable, "-m", "plimsoll_local.agent",
            "--kubeconfig", plane.kubeconfig,
            "--state", state / "agent",
            "--images", state / "images.json",
            "--node-name", NODE_NAME,
        ],
        state / "agent.log",
    )  # fmt: skip


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
