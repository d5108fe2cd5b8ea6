"""The executor of several ranks: one child process each, driven in lock-step.

In: the same calls as for one device. Out: rank 0's results, and memory figures over all ranks. The
driving process takes no part in collectives, so a rank that dies or hangs cannot block it: whatever
happens to one rank ends the whole group within seconds, as EngineFailure CollectiveFailure. This
module imports no torch.

Memory: on CUDA every figure is the worst rank's. On the CPU the ranks of a pod share one container,
so use, weights, activations, graphs, runtime and bytes per block are sums over them (and the use of
the process beside them counts as runtime); of several pods the worst counts.

Ranks in other pods (``pod_group``) join over TCP and are driven in the same way.

After an allocation failure the ranks are still in step only if it befell all of them alike; they
run the same shapes, so that is the rule. Otherwise some wait in a collective for others that have
given up, and the group ends.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
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
    SequenceChunk,
    StepBatch,
)
from plimsoll_engine.grammar import GrammarCompiler, GrammarMatchers
from plimsoll_engine.models.tokenizer import load_tokenizer
from plimsoll_engine.parallel.channels import gather_ranks
from plimsoll_engine.parallel.messages import (
    Call,
    Done,
    Failed,
    Heartbeat,
    MemoryUse,
    OutOfMemory,
    Reply,
    Start,
)
from plimsoll_engine.parallel.spawn import RankProcesses, rank_environment
from plimsoll_engine.termination import EngineFailure, FailureClass, Phase

# A rank that has not been heard of for this long counts as hung. Heartbeats come every second from
# a thread of their own, so a long step does not matter; a starved machine does.
HEARTBEAT_TIMEOUT = 10.0
# And one that is behind the others by a collective, for so long without entering the next. They do
# the same work, so what is between them is small; kernels compiled for the first time are not.
LAG_TIMEOUT = 30.0
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
    collectives: int = 0
    # When it was first told of as many collectives.
    advanced: float = 0.0

    def note(self, heartbeat: Heartbeat, now: float) -> None:
        if heartbeat.collectives != self.collectives:
            self.collectives, self.advanced = heartbeat.collectives, now

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
        compiler = GrammarCompiler(lambda: load_tokenizer(config))
        self._matchers = GrammarMatchers(compiler, 2 * config.max_num_seqs)
        self._vocab_size = 0
        self._phase = Phase.LOAD
        self._members: list[_Member] = []
        # Of this pod.
        self._processes: RankProcesses | None = None
        # Of each pod, this one first: its ranks, and what is used beside them.
        self._pods: list[range] = []
        self._beside_ranks: list[int] = []
        self._pids: tuple[int, ...] = ()
        self._memory: list[MemoryUse] = []
        self._low_water: int | None = None
        self._blocks = 0
        self._bytes_per_block = 0
        self._failure: EngineFailure | None = None
        self._folder: Path | None = None

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """Of this pod, in rank order; known once load() has returned."""
        return self._pids

    def load(self) -> ModelLimits:
        self._start_ranks()
        limits = self._call(ModelLimits, "load")[0]
        assert self._processes is not None
        self._pids = self._processes.receive_pids()
        self._vocab_size = limits.vocab_size
        return limits

    def _start_ranks(self) -> None:
        size, pods = self._config.tensor_parallel_size, self._config.pods
        own = range(size) if pods is None else pods.ranks_of(0, size)
        self._folder = Path(tempfile.mkdtemp(prefix="plimsoll-ranks-"))
        pipes = [Pipe() for _ in own]
        environment = rank_environment(self._kind, len(own), alone=pods is None)
        self._processes = RankProcesses([theirs for _, theirs in pipes], environment)
        self._members = [_Member(ours, time.monotonic()) for ours, _ in pipes]
        self._pods = [own]
        self._beside_ranks = [0]
        if pods is not None:
            joined = gather_ranks(pods, size, self._config.host)
            now = time.monotonic()
            self._members += [_Member(joined[rank][0], now) for rank in sorted(joined)]
            self._pods += [pods.ranks_of(index, size) for index in range(1, pods.size)]
            self._beside_ranks += [
                sum(joined[rank][1].own_bytes for rank in ranks) for ranks in self._pods[1:]
            ]
        # No rank needs to know who may ask the server.
        config = replace(self._config, api_key=None, api_keys=(), pods=None)
        rendezvous = f"file://{self._folder}/store" if pods is None else pods.rendezvous
        for ranks in self._pods:
            for rank in ranks:
                start = Start(config, self._kind, rank, ranks, rendezvous)
                self._members[rank].connection.send(start)

    def _devices(self) -> Iterator[tuple[range, int]]:
        """Ranks that share one memory, and what is used of it beside them."""
        if self._kind != "cpu":
            yield from ((range(rank, rank + 1), 0) for rank in range(len(self._members)))
            return
        # This process's grows while it serves; the others only wait.
        self._beside_ranks[0] = host_memory.used_bytes()
        yield from zip(self._pods, self._beside_ranks, strict=True)

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
        devices = list(self._devices())

        def worst(read: Callable[[MemoryFigures], int]) -> int:
            return max(sum(read(ranks[rank]) for rank in shared) for shared, _ in devices)

        self._bytes_per_block = worst(lambda rank: rank.bytes_per_block)
        self._phase = Phase.SERVING
        return MemoryFigures(
            total=min(rank.total for rank in ranks),
            weights=worst(lambda rank: rank.weights),
            activations=worst(lambda rank: rank.activations),
            runtime=worst(lambda rank: rank.runtime) + max(beside for _, beside in devices),
            bytes_per_block=self._bytes_per_block,
            graphs=worst(lambda rank: rank.graphs),
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
        """Grammars are kept to here, where they are compiled: the ranks are told what may come."""
        allowed = self._matchers.find_allowed(batch.chunks, self._vocab_size)
        told = StepBatch(tuple(_tell(chunk, allowed.tokens) for chunk in batch.chunks))
        sampled = cast("list[SampledToken]", self._call(list, "execute", told)[0])
        return [
            replace(token, error=allowed.errors[token.request_id])
            if token.request_id in allowed.errors
            else token
            for token in sampled
        ]

    def reclaim(self) -> None:
        self._call(type(None), "reclaim")

    def memory(self, *, reset_low_water: bool = False) -> DeviceMemory:
        """From what the ranks told with their last replies. Also looks whether they still live,
        so calling it once a second while idle finds a dead rank."""
        self._check_alive()
        present = self._present_memory()
        low_water = present.free
        if self._low_water is not None:
            low_water = min(low_water, self._low_water)
        if reset_low_water:
            self._low_water = present.free
        return DeviceMemory(present.total, present.free, max(0, low_water))

    def _present_memory(self) -> DeviceMemory:
        free, total = min(self._left(lambda use: use.used))
        return DeviceMemory(total, max(0, free), max(0, free))

    def _note_memory(self, replies: list[Done]) -> None:
        self._memory = [reply.memory for reply in replies]
        # Peaks of ranks that share a memory fall together: they do the same at the same time.
        low, _ = min(self._left(lambda use: use.peak))
        self._low_water = low if self._low_water is None else min(self._low_water, low)

    def _left(self, read: Callable[[MemoryUse], int]) -> Iterator[tuple[int, int]]:
        """Of each memory: what is left of it, and its size."""
        for ranks, beside in self._devices():
            uses = [self._memory[rank] for rank in ranks]
            total = min(use.total for use in uses)
            yield total - beside - sum(map(read, uses)), total

    def shutdown(self) -> None:
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.kill()
        for rank, member in enumerate(self._members):
            # Those of other pods end by themselves, once their connection has closed.
            if rank in self._pods[0]:
                _wait_for_end(member.connection)
            member.connection.close()
        self._members.clear()
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
            lagging = self._find_lagging(now)
            if lagging is not None and lagging not in replies:
                self._fail({lagging: None}, "hangs: the others wait for it in a collective")
            if deadline is None and any(not isinstance(r, Done) for r in replies.values()):
                deadline = now + GRACE
            if deadline is not None and now > deadline and len(replies) < len(self._members):
                break
        told = [reply for reply in replies.values() if isinstance(reply, Done | OutOfMemory)]
        if len(told) < len(self._members):
            self._fail(replies)
        return [cast("Reply", replies[rank]) for rank in range(len(self._members))]

    def _find_lagging(self, now: float) -> int | None:
        """A rank that lives, and that the others have been waiting for too long."""
        if any(now - member.advanced <= LAG_TIMEOUT for member in self._members):
            return None
        entered = [member.collectives for member in self._members]
        return entered.index(min(entered)) if min(entered) < max(entered) else None

    def _receive(self, rank: int, replies: dict[int, Reply | None]) -> None:
        """Takes one message; None stands for a closed pipe."""
        member = self._members[rank]
        try:
            message = member.connection.recv()
        except (EOFError, OSError):
            replies[rank] = None
            return
        member.last_heard = time.monotonic()
        if isinstance(message, Heartbeat):
            member.note(message, member.last_heard)
        else:
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
            what = what or self._describe_end(rank)
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

    def _describe_end(self, rank: int) -> str:
        if rank not in self._pods[0]:
            pod = next(index for index, ranks in enumerate(self._pods) if rank in ranks)
            return f"is gone, and with it pod {pod} of the group"
        ends = self._processes.ends(GRACE) if self._processes is not None else ()
        status = next((ended.status for ended in ends if ended.rank == rank), None)
        # Negative: the number of the signal. None: not told in time.
        return f"ended with status {status}"


def _wait_for_end(connection: Connection) -> None:
    """Until the other side has closed, which a killed process does at once."""
    try:
        while connection.poll(GRACE):
            connection.recv()
    except (EOFError, OSError):
        pass


def _tell(chunk: SequenceChunk, allowed: Mapping[str, bytes]) -> SequenceChunk:
    """The chunk without its grammar."""
    if chunk.sampling is None or chunk.sampling.grammar is None:
        return chunk
    return replace(
        chunk,
        sampling=replace(chunk.sampling, grammar=None),
        allowed_tokens=allowed.get(chunk.request_id),
    )
