"""Blocks found again by what they hold: the tokens in them and all tokens before.

In: full blocks of tokens, and which blocks are taken and let go. Out: block ids with the same
content, and the block to give up when one is needed. A chain of SHA-256 names a block's content
(as vLLM's prefix cache does), so that equal names mean equal tokens from the first one on: other
hashes have let one tenant read another's cache. This module knows no pool, no request and no torch.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence


def hash_root(keys: Mapping[str, str]) -> bytes:
    """Where a chain starts: chains of different ``keys`` share nothing.

    Each key goes in with its name and its length, so that no salt can be taken for the name of an
    adapter.
    """
    digest = hashlib.sha256(b"plimsoll prefix cache")
    for name, value in sorted(keys.items()):
        for text in (name, value):
            data = text.encode()
            digest.update(len(data).to_bytes(8, "big") + data)
    return digest.digest()


def hash_block(parent: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


class PrefixHashes:
    """The chain over one growing sequence; each block is hashed once."""

    def __init__(self, block_size: int, keys: Mapping[str, str]) -> None:
        self._block_size = block_size
        self._last = hash_root(keys)
        self._hashes: list[bytes] = []

    def of(self, tokens: Sequence[int], count: int) -> Sequence[bytes]:
        """Of the first ``count`` blocks of ``tokens``, which must be full. Tokens that have been
        hashed may not change."""
        for block in range(len(self._hashes), count):
            start = block * self._block_size
            self._last = hash_block(self._last, tokens[start : start + self._block_size])
            self._hashes.append(self._last)
        return self._hashes if count == len(self._hashes) else self._hashes[:count]


class PrefixCache:
    """Which block holds which content. ``evictable`` blocks have no holder and may be given up,
    the one unused for longest first; of one prefix, the last block first."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def evictable(self) -> int:
        return len(self._evictable)

    def find(self, hashes: Iterable[bytes]) -> tuple[int, ...]:
        """The blocks of the longest known start of ``hashes``."""
        found = []
        for each in hashes:
            block = self._block_of.get(each)
            if block is None:
                break
            found.append(block)
        return tuple(found)

    def remember(self, block: int, content: bytes) -> None:
        """A second block of the same content stays without a name: block tables do not change."""
        if content not in self._block_of and block not in self._hash_of:
            self._block_of[content] = block
            self._hash_of[block] = content

    def retire(self, block: int) -> bool:
        """``block`` has no holder any more; False when nobody would find it either."""
        if block not in self._hash_of:
            return False
        self._evictable[block] = None
        return True

    def revive(self, block: int) -> None:
        """``block`` has a holder again."""
        self._evictable.pop(block, None)

    def evict(self) -> int:
        """Raises KeyError when nothing is evictable."""
        block, _ = self._evictable.popitem(last=False)
        self.forget(block)
        return block

    def evict_from(self, first: int) -> list[int]:
        """All evictable blocks with ids from ``first`` on."""
        blocks = [block for block in self._evictable if block >= first]
        for block in blocks:
            del self._evictable[block]
            self.forget(block)
        return blocks

    def forget(self, block: int) -> None:
        content = self._hash_of.pop(block, None)
        if content is not None:
            del self._block_of[content]

    def evictable_blocks(self) -> tuple[int, ...]:
        """The first to go first."""
        return tuple(self._evictable)

    def check(self) -> None:
        """Raises AssertionError unless every evictable block can be found, by one name."""
        assert {block: content for content, block in self._block_of.items()} == self._hash_of
        assert all(block in self._hash_of for block in self._evictable)
