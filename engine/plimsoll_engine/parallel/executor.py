"""The executor of several ranks: one child process each, driven in lock-step.

In: the same calls as for one device. Out: rank 0's results, and memory figures over all ranks. The
driving process takes no part in collectives, so a rank that dies or hangs cannot block it: whatever
happens to one rank ends the whole group within seconds, as EngineFailure CollectiveFailure. This
module imports no torch.

Memory: on CUDA every figure is the worst rank's. On the CPU all ranks share one container, so use,
weights, activations, runtime and bytes per block are sums over the ranks (and this process's own use
counts as runtime).

After an allocation failure the ranks are still in step only if it befell all of them alike; they
run the same shapes, so that is the rule. Otherwise some wait in a collective for others that have
given up, and the group ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import NoReturn, TypeVar, cast

from plimsoll_engine import host_memory
from plimsoll_engine.config import EngineConfig
from plimsoll_engine.executor import (
    AllocationFailure,
    DeviceMemory,
    MemoryFigures,
    ModelLimits,
    SampledToken,
    StepBatch,
)
from plimsoll_engine.parallel.messages import (
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
)
from plimsoll_engine.termination import EngineFailure, FailureClass, Phase

# A rank that has not been heard of for this long counts as hung. Heartbeats come every second from
# a thread of their own, so a long step does not matter; a starved machine does.
HEARTBEAT_TIMEOUT = 10.0
# Importing torch comes before the first heartbeat.
START_TIMEOUT = 180.0
# How long the other ranks have to say what happened to them, once one has failed.
GRACE = 2.0

Result = TypeVar("Result")


@dataclass
class _Member:
    connection: Connection
    started: float
    last_heard: float | None = None

    def is_silent(self, now: float) -> bool:
        if self.last_heard is None:
            return now - self.started > START_TIMEOUT
        return now - self.last_heard > HEARTBEAT_TIMEOUT


class TensorParallelExecutor:
    """Implements ``executor.Executor``. Driven by one thread, which must outlive the ranks: they
    are killed when the thread that called ``load`` ends."""

    def __init__(self, config: EngineConfig, device_kind: str) -> None:
        self._config = config
        self._kind = device_kind
        self._phase = Phase.LOAD
        self._members: list[_Member] = []
        # The ranks' parent and its pipe.
        self._parent: subprocess.Popen[bytes] | None = None
        self._reports: Connection | None = None
        self._pids: tuple[int, ...] = ()
        self._memory: list[MemoryUse] = []
        self._peak_since_reset = 0
        self._blocks = 0
        self._bytes_per_block = 0
        self._failure: EngineFailure | None = None
        self._folder: Path | None = None

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """In rank order; known once load() has returned."""
        return self._pids

    def load(self) -> ModelLimits:
        self._start_ranks()
        limits = self._call(ModelLimits, "load")[0]
        self._pids = self._receive_pids()
        return limits

    def _start_ranks(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="plimsoll-ranks-"))
        pipes = [Pipe() for _ in range(self._config.tensor_parallel_size + 1)]
        inherited = [theirs.fileno() for _, theirs in pipes]
        self._parent = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "plimsoll_engine.parallel.rank",
                str(os.getpid()),
                *map(str, inherited),
            ],
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            env=self._rank_environment(),
        )
        for _, theirs in pipes:
            theirs.close()
        self._reports = pipes[0][0]
        for rank, (connection, _) in enumerate(pipes[1:]):
            self._members.append(_Member(connection, time.monotonic()))
            store = str(self._folder / "store")
            connection.send(Start(self._config, self._kind, rank, store))

    def _receive_pids(self) -> tuple[int, ...]:
        assert self._reports is not None
        spawned = self._reports.recv()
        assert isinstance(spawned, Spawned)
        return spawned.pids

    def _rank_environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        if self._kind == "cpu":
            # The ranks compute at the same time: they share the threads out among them.
            threads = int(environment.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
            share = max(1, threads // self._config.tensor_parallel_size)
            environment["OMP_NUM_THREADS"] = str(share)
            # No threads before the fork.
            environment["OPENBLAS_NUM_THREADS"] = "1"
            # Without it gloo looks up the host's name, which need not resolve in a pod.
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return environment

    def profile(
        self, *, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
    ) -> MemoryFigures:
        self._phase = Phase.PROFILE
        ranks = self._call(
            MemoryFigures,
            "profile",
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        join = sum if self._kind == "cpu" else max
        own = host_memory.used_bytes() if self._kind == "cpu" else 0
        self._bytes_per_block = join(rank.bytes_per_block for rank in ranks)
        self._phase = Phase.SERVING
        return MemoryFigures(
            total=min(rank.total for rank in ranks),
            weights=join(rank.weights for rank in ranks),
            activations=join(rank.activations for rank in ranks),
            runtime=join(rank.runtime for rank in ranks) + own,
            bytes_per_block=self._bytes_per_block,
        )

    def resize_kv(self, num_blocks: int) -> int:
        growth = (num_blocks - self._blocks) * self._bytes_per_block
        if growth > 0 and self._kind == "cpu":
            # Each rank looks at its own use alone; the limit is for all of them.
            memory = self._present_memory()
            if growth > memory.free:
                raise AllocationFailure(
                    f"{growth} more bytes of KV cache exceed the limit of {memory.total} bytes, "
                    f"{memory.total - memory.free} of which are used",
                    growth,
                )
        try:
            committed = self._call(int, "resize_kv", num_blocks)
        except AllocationFailure:
            # Some ranks may have grown: all go back to what they had.
            self._call(int, "resize_kv", self._blocks)
            raise
        self._blocks = min(committed)
        return self._blocks

    def execute(self, batch: StepBatch) -> list[SampledToken]:
        return cast("list[SampledToken]", self._call(list, "execute", batch)[0])

    def reclaim(self) -> None:
        self._call(type(None), "reclaim")

    def memory(self, *, reset_low_water: bool = False) -> DeviceMemory:
        """From what the ranks told with their last replies. Also looks whether they still live,
        so calling it once a second while idle finds a dead rank."""
        self._check_alive()
        present = self._present_memory()
        low_water = min(present.free, present.total - self._peak_since_reset)
        if reset_low_water:
            self._peak_since_reset = present.total - present.free
        return DeviceMemory(present.total, present.free, max(0, low_water))

    def _present_memory(self) -> DeviceMemory:
        if self._kind == "cpu":
            total = min(use.total for use in self._memory)
            used = sum(use.used for use in self._memory) + host_memory.used_bytes()
        else:
            worst = max(self._memory, key=lambda use: use.used - use.total)
            total, used = worst.total, worst.used
        free = max(0, total - used)
        return DeviceMemory(total, free, free)

    def _note_memory(self, replies: list[Done]) -> None:
        self._memory = [reply.memory for reply in replies]
        if self._kind == "cpu":
            # The ranks' peaks fall together: they do the same at the same time.
            peak = sum(use.peak for use in self._memory) + host_memory.used_bytes()
        else:
            peak = max(use.peak for use in self._memory)
        self._peak_since_reset = max(self._peak_since_reset, peak)

    def shutdown(self) -> None:
        if self._parent is not None:
            # The ranks die with it.
            self._parent.kill()
            self._parent.wait()
            self._parent = None
        for member in self._members:
            _wait_for_end(member.connection)
            member.connection.close()
        self._members.clear()
        if self._reports is not None:
            self._reports.close()
            self._reports = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _call(
        self, result: type[Result], method: str, *arguments: object, **keywords: object
    ) -> list[Result]:
        """One call to all ranks; their results in rank order."""
        if self._failure is not None:
            raise self._failure
        call = Call(method, arguments, tuple(keywords.items()))
        for rank, member in enumerate(self._members):
            try:
                member.connection.send(call)
            except OSError:
                self._fail({rank: None})
        replies = self._replies()
        done = [reply for reply in replies if isinstance(reply, Done)]
        if len(done) < len(replies):
            refused = next(reply for reply in replies if isinstance(reply, OutOfMemory))
            raise AllocationFailure(refused.message, refused.requested_bytes)
        self._note_memory(done)
        return [cast("Result", reply.result) for reply in done]

    def _replies(self) -> list[Reply]:
        """Waits for all ranks. Returns when each is done, or each ran out of memory, or (for calls
        without collectives) some of both; anything else is the end of the group."""
        replies: dict[int, Reply | None] = {}
        deadline: float | None = None
        while len(replies) < len(self._members):
            pending = {
                member.connection: rank
                for rank, member in enumerate(self._members)
                if rank not in replies
            }
            for ready in wait(list(pending), timeout=0.5):
                rank = pending[cast("Connection", ready)]
                self._receive(rank, replies)
            now = time.monotonic()
            for rank in pending.values():
                if rank not in replies and self._members[rank].is_silent(now):
                    self._fail({rank: None}, "hangs: no heartbeat")
            if deadline is None and any(not isinstance(r, Done) for r in replies.values()):
                deadline = now + GRACE
            if deadline is not None and now > deadline and len(replies) < len(self._members):
                break
        told = [reply for reply in replies.values() if isinstance(reply, Done | OutOfMemory)]
        if len(told) < len(self._members):
            self._fail(replies)
        return [cast("Reply", replies[rank]) for rank in range(len(self._members))]

    def _receive(self, rank: int, replies: dict[int, Reply | None]) -> None:
        """Takes one message; None stands for a closed pipe."""
        member = self._members[rank]
        try:
            message = member.connection.recv()
        except (EOFError, OSError):
            replies[rank] = None
            return
        member.last_heard = time.monotonic()
        if not isinstance(message, Heartbeat):
            replies[rank] = message

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure
        strays: dict[int, Reply | None] = {}
        for rank, member in enumerate(self._members):
            while rank not in strays and member.connection.poll():
                self._receive(rank, strays)
        if strays:
            self._fail(strays)

    def _fail(self, replies: dict[int, Reply | None], what: str = "") -> NoReturn:
        """Ends the group and raises why: the ranks' own EngineFailure if one told it, a dead or
        hung rank before the complaints of those that waited for it."""
        failure = self._explain(replies, what)
        self._failure = failure
        self.shutdown()
        raise failure

    def _explain(self, replies: dict[int, Reply | None], what: str) -> EngineFailure:
        failed = {rank: reply for rank, reply in replies.items() if isinstance(reply, Failed)}
        for reply in failed.values():
            if reply.failure is not None:
                return EngineFailure(**reply.failure)
        if any(isinstance(reply, OutOfMemory) for reply in replies.values()):
            serving = self._phase is Phase.SERVING
            return EngineFailure(
                FailureClass.DEVICE_OOM_AT_RUNTIME if serving else FailureClass.DEVICE_OOM_AT_START,
                self._phase,
                "some ranks had no memory for a step that others were in the middle of",
                {"ranks": len(self._members)},
            )
        dead = [rank for rank, reply in replies.items() if reply is None]
        if dead:
            rank = dead[0]
            what = what or f"ended with status {self._exit_status(rank)}"
        else:
            rank, complaint = next(iter(failed.items()))
            what = "failed: " + complaint.message.strip().splitlines()[-1]
            print(complaint.message, file=sys.stderr, flush=True)
        return EngineFailure(
            FailureClass.COLLECTIVE_FAILURE,
            self._phase,
            f"tensor-parallel rank {rank} of {len(self._members)} {what}",
            {"rank": rank, "ranks": len(self._members)},
        )

    def _exit_status(self, rank: int) -> int | None:
        """Negative: the number of the signal. None: not told in time."""
        reports = self._reports
        try:
            while reports is not None and reports.poll(GRACE):
                report = reports.recv()
                if isinstance(report, Ended) and report.rank == rank:
                    return report.status
        except (EOFError, OSError):
            pass
        return None


def _wait_for_end(connection: Connection) -> None:
    """Until the other side has closed, which a killed process does at once."""
    try:
        while connection.poll(GRACE):
            connection.recv()
    except (EOFError, OSError):
        pass
