"""Connections between the leader of a group of pods and the ranks in the other pods.

In: a PodGroup. Out: ``multiprocessing`` connections that both sides have proved to know the group's
token over, one for each rank. Nothing is read from a connection before that; what travels then is
not encrypted. A peer that has vanished without a word is noticed within PEER_SECONDS.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import Empty, Queue

from plimsoll_engine.pod_group import PodGroup
from plimsoll_engine.server.listener import bind
from plimsoll_engine.termination import EngineFailure, FailureClass, Phase

log = logging.getLogger(__name__)

# Pods of a group start together, but images are pulled and nodes are found one by one.
JOIN_SECONDS = 600.0
RETRY_SECONDS = 0.5
# Each side sends something every second or answers it.
PEER_SECONDS = 10


@dataclass(frozen=True)
class Join:
    """What a member says first on each connection. ``own_bytes`` is what it uses itself, beside
    its ranks."""

    rank: int
    own_bytes: int


def gather_ranks(
    pods: PodGroup, total: int, host: str, seconds: float = JOIN_SECONDS
) -> dict[int, tuple[Connection, Join]]:
    """The leader's: waits for every rank of the other pods. Raises EngineFailure."""
    missing = set(range(total)) - set(pods.ranks_of(0, total))
    joined: dict[int, tuple[Connection, Join]] = {}
    arrivals: Queue[tuple[Connection, Join]] = Queue()
    deadline = time.monotonic() + seconds
    with bind(host, pods.port, flag="--group-port") as listener:
        listener.listen()
        accepting = threading.Thread(target=_accept, args=(listener, pods, arrivals), daemon=True)
        accepting.start()
        try:
            while missing:
                try:
                    left = max(0.0, deadline - time.monotonic())
                    connection, join = arrivals.get(timeout=left)
                except Empty:
                    raise _not_joined(missing, pods, total, seconds) from None
                if join.rank in missing:
                    missing.remove(join.rank)
                    joined[join.rank] = (connection, join)
                    log.info("rank %d of %d has joined", join.rank, total)
                else:
                    log.warning("rank %d joined again or does not belong here", join.rank)
                    connection.close()
        finally:
            # Wakes the thread out of accept(), which would hold the port.
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
    return joined


def _not_joined(missing: set[int], pods: PodGroup, total: int, seconds: float) -> EngineFailure:
    return EngineFailure(
        FailureClass.COLLECTIVE_FAILURE,
        Phase.LOAD,
        f"ranks {sorted(missing)} of {total} did not join within {seconds:g} s: their pods of the "
        f"group of {pods.size} have not started, or cannot reach {pods.leader}:{pods.port}",
        {"ranks": total, "pods": pods.size, "missing": len(missing)},
    )


def join_group(
    pods: PodGroup, rank: int, own_bytes: int, *, leaving: Callable[[], bool], seconds: float
) -> Connection:
    """A member's: the connection of one of its ranks to the leader. Raises EngineFailure, also when
    ``leaving`` becomes true."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while True:
        try:
            return _connect(pods, rank, own_bytes)
        except AuthenticationError:
            raise EngineFailure(
                FailureClass.INVALID_CONFIGURATION,
                Phase.CONFIGURATION,
                f"PLIMSOLL_GROUP_TOKEN is not that of the leader at {pods.leader}:{pods.port}",
            ) from None
        except (OSError, EOFError) as error:
            if leaving() or time.monotonic() > deadline:
                raise EngineFailure(
                    FailureClass.COLLECTIVE_FAILURE,
                    Phase.LOAD,
                    f"the leader at {pods.leader}:{pods.port} cannot be reached: {error}",
                    {"rank": rank, "pods": pods.size},
                ) from error
        pause.wait(RETRY_SECONDS)


def _connect(pods: PodGroup, rank: int, own_bytes: int) -> Connection:
    connection = _open(socket.create_connection((pods.leader, pods.port), PEER_SECONDS))
    try:
        answer_challenge(connection, pods.token.encode())
        deliver_challenge(connection, pods.token.encode())
        connection.send(Join(rank, own_bytes))
    except BaseException:
        connection.close()
        raise
    return connection


def _accept(
    listener: socket.socket, pods: PodGroup, arrivals: Queue[tuple[Connection, Join]]
) -> None:
    """Each in a thread of its own: one that says nothing holds up nobody."""
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_admit, args=(peer, pods, arrivals), daemon=True).start()


def _admit(peer: socket.socket, pods: PodGroup, arrivals: Queue[tuple[Connection, Join]]) -> None:
    connection = _open(peer)
    try:
        deliver_challenge(connection, pods.token.encode())
        answer_challenge(connection, pods.token.encode())
        arrivals.put((connection, connection.recv()))
    except (OSError, EOFError, AuthenticationError) as error:
        log.warning("a connection to the group's port was refused: %s", error or "no answer")
        connection.close()


def _open(peer: socket.socket) -> Connection:
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PEER_SECONDS)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, PEER_SECONDS * 1000)
    return Connection(peer.detach())
