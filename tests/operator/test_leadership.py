"""One leader at a time over a Lease that a server keeps, with its conflicts and its silences."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from plimsoll_operator.cluster import ApiError, Cluster
from plimsoll_operator.leadership import Leadership, LeadershipLostError, LeaseName
from plimsoll_operator.lease import LeaseTimes
from plimsoll_operator.resources import Resource

Json = dict[str, Any]
NAME = LeaseName("ops", "plimsoll")
TIMES = LeaseTimes(duration=1.0, renew_deadline=0.2, retry=0.01)


class LeaseServer(Cluster):
    """Holds one Lease; ``broken`` refuses every request, ``silent`` answers none."""

    def __init__(self) -> None:
        self.live: Json | None = None
        self.broken = False
        self.silent = False

    async def get(self, resource: Resource, namespace: str, name: str) -> Json | None:
        await self._answer()
        return self.live

    async def create(self, resource: Resource, namespace: str, body: Json) -> Json:
        await self._answer()
        if self.live is not None:
            raise ApiError(409, "already exists")
        return self._store(body, 1)

    async def replace(self, resource: Resource, body: Json) -> Json:
        await self._answer()
        assert self.live is not None
        version = self.live["metadata"]["resourceVersion"]
        if body["metadata"]["resourceVersion"] != version:
            raise ApiError(409, "the object has been modified")
        return self._store(body, int(version) + 1)

    @property
    def holder(self) -> str | None:
        return None if self.live is None else self.live["spec"]["holderIdentity"]

    def _store(self, body: Json, version: int) -> Json:
        self.live = {**body, "metadata": {**body["metadata"], "resourceVersion": str(version)}}
        return self.live

    async def _answer(self) -> None:
        await asyncio.sleep(0)
        if self.silent:
            await asyncio.Event().wait()
        if self.broken:
            raise ApiError(503, "try again")


class Work:
    def __init__(self) -> None:
        self.running = asyncio.Event()
        self.stopped = False
        self.end = asyncio.Event()

    async def __call__(self) -> None:
        self.running.set()
        try:
            await self.end.wait()
        finally:
            self.running.clear()
            self.stopped = True


async def begin(server: LeaseServer, identity: str, work: Callable[[], Awaitable[None]]) -> Any:
    leadership = Leadership(server, NAME, identity, TIMES)
    return leadership, asyncio.create_task(leadership.run(work))


async def test_one_works_and_the_other_takes_over_when_the_first_ends() -> None:
    server, first, second = LeaseServer(), Work(), Work()
    leader, leading = await begin(server, "a", first)
    await first.running.wait()
    standby, waiting = await begin(server, "b", second)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert standby.holder == "a"
    assert leader.leads
    assert not second.running.is_set()
    first.end.set()
    await leading
    assert server.holder in ("", "b")
    await asyncio.wait_for(second.running.wait(), 0.9)  # it was given back: no wait for its end
    assert first.stopped
    second.end.set()
    await waiting


async def test_a_dead_leader_is_replaced_when_its_lease_is_over() -> None:
    server, first, second = LeaseServer(), Work(), Work()
    _, leading = await begin(server, "a", first)
    await first.running.wait()
    # As SIGKILL leaves it: nothing is given back.
    server.broken = True
    leading.cancel()
    await asyncio.gather(leading, return_exceptions=True)
    server.broken = False
    assert server.holder == "a"
    _, waiting = await begin(server, "b", second)
    await asyncio.wait_for(second.running.wait(), 10)
    assert server.holder == "b"
    second.end.set()
    await waiting


@pytest.mark.parametrize("fault", ["broken", "silent"])
async def test_a_leader_that_cannot_renew_stops_before_another_may_begin(fault: str) -> None:
    server, work = LeaseServer(), Work()
    leadership, leading = await begin(server, "a", work)
    await work.running.wait()
    setattr(server, fault, True)
    with pytest.raises(LeadershipLostError):
        await asyncio.wait_for(leading, 0.9)
    assert work.stopped
    assert not leadership.leads


async def test_a_short_silence_costs_nothing() -> None:
    server, work = LeaseServer(), Work()
    _, leading = await begin(server, "a", work)
    await work.running.wait()
    server.broken = True
    await asyncio.sleep(0.05)
    server.broken = False
    work.end.set()
    await leading
    assert server.holder == ""


async def test_who_lost_the_lease_to_another_stops_at_once() -> None:
    server, work = LeaseServer(), Work()
    _, leading = await begin(server, "a", work)
    await work.running.wait()
    assert server.live is not None
    server._store({**server.live, "spec": {**server.live["spec"], "holderIdentity": "b"}}, 99)
    with pytest.raises(LeadershipLostError):
        await leading
    assert work.stopped
    assert server.holder == "b"


async def test_what_the_work_raises_is_raised() -> None:
    async def work() -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        await Leadership(LeaseServer(), NAME, "a", TIMES).run(work)
