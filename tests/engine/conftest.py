"""What every test of the engine in its own process has to live with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from plimsoll_engine import host_memory

# For the pool and the steps of a test's model.
ROOM = 1 << 30


@pytest.fixture(scope="session", autouse=True)
def available_bytes() -> Iterator[Callable[..., int]]:
    """The machine has no more than ROOM left: the pool of an engine is written when it is planned,
    so a test that says nothing of memory would take all that there is, and with others beside it
    more. Gives the real function."""
    real = host_memory.available_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "available_bytes", lambda: min(ROOM, real()))
        yield real
