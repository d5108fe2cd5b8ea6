"""The tensor-parallel ranks: processes that each run a ModelRunner as their executor tells them.

Started as ``python -m plimsoll_engine.parallel.rank PARENT_PID FD FD...`` with one end of a pipe for
itself and one for each rank. It imports torch once, forks the ranks and then only watches them. Each
process dies with its parent (PDEATHSIG), and a rank when its pipe closes. All ranks tell results;
only rank 0's count.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

# Reading a configuration imports it, two seconds of it: once before the fork, not in each rank.
import transformers.models.llama.configuration_llama  # noqa: F401

from plimsoll_engine.executor import AllocationFailure
from plimsoll_engine.model_runner import ModelRunner
from plimsoll_engine.parallel.group import DistributedGroup
from plimsoll_engine.parallel.messages import (
    HEARTBEAT_SECONDS,
    Call,
    Done,
    Ended,
    Failed,
    Heartbeat,
    MemoryUse,
    OutOfMemory,
    Reply,
    Spawned,
    Start,
    failed,
)
from plimsoll_engine.termination import EngineFailure

_PR_SET_PDEATHSIG = 1
# A rank waits this long for its peers inside a collective. Longer than any step's share of work
# between two collectives; a peer that is dead or stopped is found sooner, by the executor.
COLLECTIVE_SECONDS = 120.0


class Rank:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._send_lock = threading.Lock()
        self._group: DistributedGroup | None = None

    def run(self) -> None:
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        start = self._connection.recv()
        try:
            self._group = _join_ranks(start)
            runner = ModelRunner(start.config, start.device_kind, self._group)
        except EngineFailure as failure:
            self._send(failed(failure))
            return
        except Exception:  # noqa: BLE001 (whatever the backend raises: the executor must know)
            self._send(Failed(traceback.format_exc()))
            return
        while True:
            try:
                call = self._connection.recv()
            except EOFError:
                return
            reply = _answer(runner, call)
            self._send(reply)
            if isinstance(reply, Failed):
                return

    def _send(self, message: Reply | Heartbeat) -> None:
        with self._send_lock:
            self._connection.send(message)

    def _beat(self) -> None:
        pause = threading.Event()
        while True:
            try:
                self._send(Heartbeat(self._group.collectives if self._group else 0))
            except OSError:
                # The executor is gone.
                os._exit(1)
            pause.wait(HEARTBEAT_SECONDS)


def _join_ranks(start: Start) -> DistributedGroup:
    size = start.config.tensor_parallel_size
    local_rank = start.pod_ranks.index(start.rank)
    if start.device_kind == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        "gloo" if start.device_kind == "cpu" else "nccl",
        init_method=start.rendezvous,
        rank=start.rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=COLLECTIVE_SECONDS),
    )
    device = torch.device(start.device_kind, 0 if start.device_kind == "cpu" else local_rank)
    return DistributedGroup(device, start.pod_ranks)


def _answer(runner: ModelRunner, call: Call) -> Reply:
    try:
        result = getattr(runner, call.method)(*call.arguments, **dict(call.keywords))
        use = runner.device_use(reset_peak=True)
        return Done(result, MemoryUse(use.total, use.used, use.peak))
    except AllocationFailure as failure:
        return OutOfMemory(str(failure), failure.requested_bytes)
    except EngineFailure as failure:
        return failed(failure)
    except Exception:  # noqa: BLE001 (a peer died in a collective, or worse: tell it, then end)
        return Failed(traceback.format_exc())


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It ended before the call.
        os._exit(1)


def _fork_rank(connections: list[Connection], rank: int) -> int:
    """The child's process id; in the child it does not return."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    die_with_parent(parent)
    for other, connection in enumerate(connections):
        if other != rank:
            connection.close()
    try:
        Rank(connections[rank]).run()
    finally:
        # Without the interpreter's teardown: a peer may be gone, and gloo would wait for it.
        os._exit(0)


def main() -> None:
    parent, own, *descriptors = map(int, sys.argv[1:])
    die_with_parent(parent)
    # Signals to the process group (a terminal's Ctrl-C) are the parent's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    report = Connection(own)
    connections = [Connection(descriptor) for descriptor in descriptors]
    pids = [_fork_rank(connections, rank) for rank in range(len(connections))]
    # A rank's pipe must close when the rank ends.
    for connection in connections:
        connection.close()
    report.send(Spawned(tuple(pids)))
    for _ in pids:
        pid, status = os.wait()
        report.send(Ended(pids.index(pid), os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()
