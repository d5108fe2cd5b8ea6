"""What every test of the engine in its own process has to live with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from plimsoll_engine import host_memory

# Of the pool and the steps of a test's model.
ROOM = 1 << 30


@pytest.fixture(scope="session", autouse=True)
def machine_bytes() -> Iterator[Callable[[], int]]:
    """The machine is as large as this process and ROOM, for the pool of an engine is written when
    it is planned: a test that says nothing of memory would take all that the machine has, and with
    others beside it more. Gives the real function."""
    real = host_memory.machine_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "machine_bytes", lambda: host_memory.used_bytes() + ROOM)
        yield real
