"""The rank processes of one pod, and their parent, which forks them and tells how each ended.

In: one end of a connection for each rank, whose other end drives it. Out: process ids, and the end
of each. They are killed when the thread that spawned them ends. This module imports no torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, Pipe

from plimsoll_engine.parallel.messages import Ended, Spawned


class RankProcesses:
    """``connections`` are the ranks' from now on, in their order in this pod."""

    def __init__(self, connections: Sequence[Connection], environment: dict[str, str]) -> None:
        self._reports, theirs = Pipe()
        inherited = [connection.fileno() for connection in (theirs, *connections)]
        arguments = [str(os.getpid()), *map(str, inherited)]
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "plimsoll_engine.parallel.rank", *arguments],
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        for connection in (theirs, *connections):
            connection.close()

    def receive_pids(self) -> tuple[int, ...]:
        """In rank order. Blocks while they are being forked."""
        spawned = self._reports.recv()
        assert isinstance(spawned, Spawned)
        return spawned.pids

    def ends(self, seconds: float) -> Iterable[Ended]:
        """Those of the ranks that end within the time, as they do; after that of the last, or when
        the parent itself has ended, there are no more."""
        deadline = time.monotonic() + seconds
        try:
            while self._reports.poll(max(0.0, deadline - time.monotonic())):
                report = self._reports.recv()
                if isinstance(report, Ended):
                    yield report
        except (EOFError, OSError):
            return

    def kill(self) -> None:
        # The ranks die with it.
        self._parent.kill()
        self._parent.wait()
        self._reports.close()


def rank_environment(device_kind: str, num_ranks: int, *, alone: bool) -> dict[str, str]:
    """For ``num_ranks`` in this pod; ``alone``: there are none in others."""
    environment = dict(os.environ)
    if device_kind == "cpu":
        # The ranks compute at the same time: they share the threads out among them.
        threads = int(environment.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
        environment["OMP_NUM_THREADS"] = str(max(1, threads // num_ranks))
        # No threads before the fork.
        environment["OPENBLAS_NUM_THREADS"] = "1"
        if alone:
            # Without it gloo looks up the host's name, which need not resolve in a pod.
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment
