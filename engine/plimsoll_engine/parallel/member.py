"""A pod of a group that does not lead: it holds ranks, which the leader drives, and says whether
they live.

In: the configuration, with its PodGroup. Out: the exit status. It serves /health and nothing else:
200 from the time its ranks have joined until one of them ends. The end of one, or of the leader, is
the end of the pod; after SIGTERM it waits for the leader to let the ranks go, which drains first.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from plimsoll_engine import host_memory
from plimsoll_engine.config import ConfigError, EngineConfig
from plimsoll_engine.parallel.channels import JOIN_SECONDS, join_group
from plimsoll_engine.parallel.messages import Ended
from plimsoll_engine.parallel.spawn import RankProcesses, rank_environment
from plimsoll_engine.pod_group import PodGroup
from plimsoll_engine.runner import device_kind
from plimsoll_engine.server.listener import bind
from plimsoll_engine.termination import (
    EngineFailure,
    FailureClass,
    Phase,
    write_termination_message,
)

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.2
# Beside the leader's time to drain.
LEAVE_SECONDS = 10.0


def run_member(config: EngineConfig, pods: PodGroup) -> int:
    """Blocks until the ranks of this pod have ended; returns the exit status."""
    leaving = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: leaving.set())
    health = None
    try:
        health = Health(config.host, config.port)
        processes = _join(config, pods, leaving)
        try:
            health.healthy = True
            ended = _wait(processes, leaving, config.shutdown_timeout + LEAVE_SECONDS)
        finally:
            health.healthy = False
            processes.kill()
        failure = None if leaving.is_set() else _explain(ended, config, pods)
    except ConfigError as error:
        failure = error.to_failure()
    except EngineFailure as error:
        failure = None if leaving.is_set() else error
    if health is not None:
        health.close()
    if failure is None:
        return 0
    write_termination_message(failure)
    return failure.exit_status


def _join(config: EngineConfig, pods: PodGroup, leaving: threading.Event) -> RankProcesses:
    ranks = pods.ranks_of(pods.index, config.tensor_parallel_size)
    log.info("joining the leader at %s with ranks %s", pods.leader, list(ranks))
    own = host_memory.used_bytes()
    # The figure is told once, of all ranks with the first.
    connections = [
        join_group(
            pods,
            rank,
            own if rank == ranks.start else 0,
            leaving=leaving.is_set,
            seconds=JOIN_SECONDS,
        )
        for rank in ranks
    ]
    environment = rank_environment(device_kind(config.device), len(ranks), alone=False)
    processes = RankProcesses(connections, environment)
    processes.receive_pids()
    return processes


def _wait(processes: RankProcesses, leaving: threading.Event, seconds: float) -> Ended | None:
    """The first end of a rank; None when none comes in ``seconds`` after SIGTERM."""
    deadline: float | None = None
    while True:
        for ended in processes.ends(WATCH_SECONDS):
            return ended
        if leaving.is_set():
            deadline = deadline or time.monotonic() + seconds
            if time.monotonic() > deadline:
                return None


def _explain(ended: Ended | None, config: EngineConfig, pods: PodGroup) -> EngineFailure:
    assert ended is not None, "without SIGTERM there is no other way out"
    rank = pods.ranks_of(pods.index, config.tensor_parallel_size)[ended.rank]
    why = f"rank {rank} of {config.tensor_parallel_size} ended with status {ended.status}"
    if ended.status >= 0:
        why += f": the leader at {pods.leader} is gone, or has ended the group and says why"
    return EngineFailure(
        FailureClass.COLLECTIVE_FAILURE,
        Phase.SERVING,
        why,
        {"rank": rank, "ranks": config.tensor_parallel_size, "status": ended.status},
    )


class Health:
    """GET /health on a thread of its own."""

    def __init__(self, host: str, port: int) -> None:
        self.healthy = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.path == "/health"
                self.send_response((200 if outer.healthy else 503) if known else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        listener = bind(host, port)
        self._server = ThreadingHTTPServer((host, port), Handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = listener
        self._server.server_activate()
        threading.Thread(target=self._server.serve_forever, name="health", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
