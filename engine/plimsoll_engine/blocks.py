"""The pool of KV blocks: which logical block id is free, and how many hold each of the others.

In: how many blocks are wanted, shared, given back, or may be used from now on. Out: block ids. The
pool knows neither the memory behind an id nor what a request is. A released block whose content is
known stays findable (``prefix_cache``) until ``allocate`` needs it: it counts as free.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from plimsoll_engine.prefix_cache import PrefixCache


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
        self._references: dict[int, int] = {}
        self._owned_above = 0
        self._cache = PrefixCache()
        self.set_usable(committed if usable is None else usable)

    @property
    def committed(self) -> int:
        return self._committed

    @property
    def usable(self) -> int:
        return self._usable

    @property
    def free(self) -> int:
        """Blocks that can be allocated now, findable ones included."""
        return len(self._free) + self._cache.evictable

    @property
    def used(self) -> int:
        return len(self._references)

    @property
    def used_above_line(self) -> int:
        """Owned blocks with ids at or above ``usable``: what a shrink still waits for."""
        return self._owned_above

    @property
    def owned_end(self) -> int:
        """The smallest pool, in blocks, that keeps the usable and the owned ones."""
        if not self._owned_above:
            return self._usable
        return max(self._references) + 1

    def find(self, hashes: Iterable[bytes]) -> tuple[int, ...]:
        """The blocks that hold the longest known start of a chain of contents. None above the
        line is among them: to share it would keep a shrink waiting."""
        found = self._cache.find(hashes)
        above = (place for place, block in enumerate(found) if block >= self._usable)
        return found[: next(above, len(found))]

    def count_owned(self, ids: Iterable[int]) -> int:
        """Of ``ids``, those that cost nothing to share."""
        return sum(block in self._references for block in ids)

    def remember(self, block: int, content: bytes) -> None:
        """``block``, which is owned, now holds this for good."""
        self._cache.remember(block, content)

    def allocate(self, count: int, shared: Sequence[int] = ()) -> tuple[int, ...] | None:
        """The ``shared`` blocks, as ``find`` gave them, and ``count`` new ones, lowest ids first;
        or None and nothing has changed."""
        if count > self.free - (len(shared) - self.count_owned(shared)):
            return None
        for block in shared:
            self._cache.revive(block)
            self._references[block] = self._references.get(block, 0) + 1
        new = tuple([self._take() for _ in range(count)])
        self._references.update(dict.fromkeys(new, 1))
        return (*shared, *new)

    def release(self, ids: Iterable[int]) -> None:
        """One holder lets go of ``ids``. Raises ValueError, and changes nothing, for a block that
        nobody holds."""
        ids = tuple(ids)
        if len(set(ids)) != len(ids):
            raise ValueError(f"a block is given back twice: {ids}")
        for block in ids:
            if block not in self._references:
                raise ValueError(f"block {block} is held by nobody")
        # The end of a prefix is of less use than its start: it is to be evicted first.
        for block in reversed(ids):
            self._references[block] -= 1
            if not self._references[block]:
                del self._references[block]
                self._put_back(block)

    def set_usable(self, usable: int) -> None:
        """Moves the line, at once for every later ``allocate``. Findable blocks above it are
        given up."""
        if not 0 <= usable <= self._committed:
            raise ValueError(f"usable blocks {usable}: allowed are 0 to {self._committed}")
        self._usable = usable
        unowned = self._withdrawn.union(self._free, self._cache.evict_from(usable))
        self._withdrawn = {block for block in unowned if block >= usable}
        # A sorted list is a heap.
        self._free = sorted(unowned - self._withdrawn)
        self._owned_above = sum(block >= usable for block in self._references)

    def set_committed(self, committed: int) -> None:
        """Blocks [0, committed) have memory from now on; new ones are above the line at first.

        Raises ValueError when that would take a usable or an owned block away.
        """
        if committed < self._usable:
            raise ValueError(f"{committed} committed blocks are fewer than usable: {self._usable}")
        owned = [block for block in self._references if block >= committed]
        if owned:
            raise ValueError(f"blocks {sorted(owned)} are owned, {committed} are to be committed")
        self._withdrawn.update(range(self._committed, committed))
        self._withdrawn = {block for block in self._withdrawn if block < committed}
        self._committed = committed

    def check(self, tables: Mapping[str, Iterable[int]]) -> None:
        """Raises AssertionError unless every block is in exactly one place, with as many holders
        as the pool counts.

        ``tables`` is what the owners believe they hold.
        """
        held: Counter[int] = Counter()
        for owner, ids in tables.items():
            table = Counter(ids)
            assert table.total() == len(table), f"a block twice in the table of {owner}: {table}"
            held += table
        assert held == self._references, f"tables {held}, pool {self._references}"
        evictable = self._cache.evictable_blocks()
        places = [*self._free, *self._withdrawn, *self._references, *evictable]
        assert sorted(places) == list(range(self._committed)), f"lost or doubled blocks: {places}"
        assert all(block < self._usable for block in (*self._free, *evictable))
        assert all(block >= self._usable for block in self._withdrawn)
        assert self._owned_above == sum(block >= self._usable for block in self._references)
        self._cache.check()

    def _take(self) -> int:
        return heapq.heappop(self._free) if self._free else self._cache.evict()

    def _put_back(self, block: int) -> None:
        if block >= self._usable:
            self._cache.forget(block)
            self._withdrawn.add(block)
            self._owned_above -= 1
        elif not self._cache.retire(block):
            heapq.heappush(self._free, block)
