"""Moves the pool's size while requests run: the line at once, the memory behind it when it can.

In: the blocks wanted. Out: whether they are in force. Between the two stand blocks above the line
that requests still own, and the longest live request, below whose need the line never goes. Knows
the pool, the scheduler's need and the executor's memory; no limits and no figures in bytes.
"""

from __future__ import annotations

from plimsoll_engine.blocks import BlockPool
from plimsoll_engine.executor import Executor
from plimsoll_engine.scheduler import Scheduler


class PoolResizer:
    """``target`` is the usable blocks asked for last; ``settled`` when they are in force."""

    def __init__(self, pool: BlockPool, scheduler: Scheduler, executor: Executor) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._executor = executor
        self.target = pool.usable
        # The smallest pool that the executor was asked for since it last grew.
        self._asked = pool.committed

    @property
    def settled(self) -> bool:
        return self._pool.usable == self.target and not self._pool.used_above_line

    @property
    def committed(self) -> int:
        return self._pool.committed

    @property
    def waiting_for(self) -> str:
        """Empty when settled."""
        if self._pool.usable > self.target:
            return (
                f"a live request needs {self._pool.usable} blocks, more than the {self.target} "
                "asked for"
            )
        if self._pool.used_above_line:
            return f"{self._pool.used_above_line} blocks above the line are still owned"
        return ""

    def move(self, target: int) -> None:
        """Raises AllocationFailure when the device refuses the growth; nothing has changed then."""
        if target > self._pool.usable:
            self._raise_line(target)
        self.target = target
        self.settle()

    def settle(self) -> None:
        """Called between steps: lowers the line as far as live requests allow, and gives memory
        that nobody owns any more back to the device."""
        if self.target < self._pool.usable:
            line = max(self.target, min(self._pool.usable, self._scheduler.largest_need))
            if line < self._pool.usable:
                self._pool.set_usable(line)
        floor = self._pool.owned_end
        if floor < self._asked:
            self._asked = floor
            self._pool.set_committed(self._executor.resize_kv(floor))

    def make_fit(self, num_blocks: int) -> None:
        """Raises the line again for a request that was accepted just before it was lowered.

        Raises AllocationFailure.
        """
        if num_blocks > self._pool.usable:
            self._raise_line(num_blocks)

    def _raise_line(self, usable: int) -> None:
        if usable > self._pool.committed:
            self._pool.set_committed(self._executor.resize_kv(usable))
        self._asked = self._pool.committed
        self._pool.set_usable(usable)
