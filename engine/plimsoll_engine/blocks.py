"""The pool of KV blocks: which logical block id is free, and who owns the others.

In: how many blocks are wanted, given back, or may be used from now on. Out: block ids. The pool
knows neither the memory behind an id nor what a request is beyond its name. A prefix cache would
come between ``release`` and the free list: a released block whose content is known stays findable
until ``allocate`` takes it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping


class BlockPool:
    """Block ids [0, committed) have memory; ids [0, usable) may be handed out.

    ``usable`` moves at any time. Blocks at or above it stay with their owners until released, and
    are then withdrawn instead of free. Low ids go first, so that the top of the pool empties by
    itself and a shrink rarely waits.
    """

    def __init__(self, committed: int, usable: int | None = None) -> None:
        self._committed = committed
        self._usable = committed
        self._free = list(range(committed))
        self._withdrawn: set[int] = set()
        self._owners: dict[int, str] = {}
        self._owned_above = 0
        self.set_usable(committed if usable is None else usable)

    @property
    def committed(self) -> int:
        return self._committed

    @property
    def usable(self) -> int:
        return self._usable

    @property
    def free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._owners)

    @property
    def used_above_line(self) -> int:
        """Owned blocks with ids at or above ``usable``: what a shrink still waits for."""
        return self._owned_above

    @property
    def owned_end(self) -> int:
        """The smallest pool, in blocks, that keeps the usable and the owned ones."""
        if not self._owned_above:
            return self._usable
        return max(self._owners) + 1

    def allocate(self, owner: str, count: int) -> tuple[int, ...] | None:
        """All ``count`` blocks, lowest ids first, or None and nothing has changed."""
        if count > len(self._free):
            return None
        ids = tuple(heapq.heappop(self._free) for _ in range(count))
        self._owners.update(dict.fromkeys(ids, owner))
        return ids

    def release(self, owner: str, ids: Iterable[int]) -> None:
        """Raises ValueError, and changes nothing, for a block that ``owner`` does not hold."""
        ids = tuple(ids)
        if len(set(ids)) != len(ids):
            raise ValueError(f"a block is given back twice: {ids}")
        for block in ids:
            if self._owners.get(block) != owner:
                raise ValueError(f"block {block} is held by {self._owners.get(block)}, not {owner}")
        for block in ids:
            del self._owners[block]
            if block < self._usable:
                heapq.heappush(self._free, block)
            else:
                self._withdrawn.add(block)
                self._owned_above -= 1

    def set_usable(self, usable: int) -> None:
        """Moves the line, at once for every later ``allocate``."""
        if not 0 <= usable <= self._committed:
            raise ValueError(f"usable blocks {usable}: allowed are 0 to {self._committed}")
        self._usable = usable
        unowned = self._withdrawn.union(self._free)
        self._withdrawn = {block for block in unowned if block >= usable}
        # A sorted list is a heap.
        self._free = sorted(unowned - self._withdrawn)
        self._owned_above = sum(block >= usable for block in self._owners)

    def set_committed(self, committed: int) -> None:
        """Blocks [0, committed) have memory from now on; new ones are above the line at first.

        Raises ValueError when that would take a usable or an owned block away.
        """
        if committed < self._usable:
            raise ValueError(f"{committed} committed blocks are fewer than usable: {self._usable}")
        owned = [block for block in self._owners if block >= committed]
        if owned:
            raise ValueError(f"blocks {sorted(owned)} are owned, {committed} are to be committed")
        self._withdrawn.update(range(self._committed, committed))
        self._withdrawn = {block for block in self._withdrawn if block < committed}
        self._committed = committed

    def check(self, tables: Mapping[str, Iterable[int]]) -> None:
        """Raises AssertionError unless every block is in exactly one place.

        ``tables`` is what the owners believe they hold.
        """
        held = Counter(block for ids in tables.values() for block in ids)
        twice = [block for block, count in held.items() if count > 1]
        assert not twice, f"blocks with two owners: {twice}"
        believed = {block: owner for owner, ids in tables.items() for block in ids}
        assert believed == self._owners, f"tables {believed}, pool {self._owners}"
        places = [*self._free, *self._withdrawn, *self._owners]
        assert sorted(places) == list(range(self._committed)), f"lost or doubled blocks: {places}"
        assert all(block < self._usable for block in self._free)
        assert all(block >= self._usable for block in self._withdrawn)
        assert self._owned_above == sum(block >= self._usable for block in self._owners)
