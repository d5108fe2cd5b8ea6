"""Several pods that hold the ranks of one model, as LeaderWorkerSet tells each of them.

``config`` reads the variables; a pod alone has no group. Which ranks are in which pod, and where
they find each other, is known here; connections are not. The first pod leads: it serves and drives
all ranks; the others only hold ranks (``parallel.member``).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PodGroup:
    # LWS_LEADER_ADDRESS, LWS_GROUP_SIZE, LWS_WORKER_INDEX.
    leader: str
    size: int
    index: int
    # The leader's; ranks find each other for collectives on the one after it.
    port: int
    # PLIMSOLL_GROUP_TOKEN: whoever has it may drive the ranks.
    token: str = field(repr=False)

    @property
    def leads(self) -> bool:
        return self.index == 0

    @property
    def rendezvous(self) -> str:
        return f"tcp://{self.leader}:{self.port + 1}"

    def ranks_of(self, index: int, total: int) -> range:
        """The ranks of one pod, of ``total`` in the group."""
        each = total // self.size
        return range(index * each, (index + 1) * each)
