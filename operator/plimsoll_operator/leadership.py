"""Works only while it holds the Lease.

In: the API server, the Lease's name, what to do as the leader. Out: that done by one operator at a
time. The judgement is in lease.py; nothing here knows what the leader does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp

from plimsoll_operator.cluster import LEASE, ApiError, Cluster
from plimsoll_operator.lease import LeaseTimes, Seen, claim, release
from plimsoll_operator.observed import Json

logger = logging.getLogger(__name__)


class LeadershipLostError(Exception):
    """The Lease could not be renewed in time, or somebody else has it."""


@dataclass(frozen=True)
class LeaseName:
    namespace: str
    name: str


class Leadership:
    """``holder`` is who has the Lease, as last seen; None before the first look."""

    def __init__(
        self, cluster: Cluster, lease: LeaseName, identity: str, times: LeaseTimes | None = None
    ) -> None:
        self.holder: str | None = None
        self._cluster = cluster
        self._lease = lease
        self._identity = identity
        self._times = times or LeaseTimes()
        self._seen: Seen | None = None

    @property
    def leads(self) -> bool:
        return self.holder == self._identity

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Waits for the Lease, then works until ``work`` ends. Raises LeadershipLostError, after
        ``work`` has been cancelled, when the Lease is lost."""
        await self._take()
        logger.info("%s leads", self._identity)
        working = asyncio.ensure_future(work())
        renewing = asyncio.ensure_future(self._renew())
        try:
            await asyncio.wait((working, renewing), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise LeadershipLostError(f"the Lease is no longer held by {self._identity}")
            await working
        finally:
            for task in (renewing, working):
                task.cancel()
            await asyncio.gather(renewing, working, return_exceptions=True)
            if self.leads:
                await self._give_up()

    async def _renew(self) -> None:
        """Returns when the Lease is lost, before another may have it."""
        while True:
            await asyncio.sleep(self._times.retry)
            try:
                async with asyncio.timeout(self._times.renew_deadline):
                    await self._take(again=True)
            except TimeoutError:
                self.holder = None
            if not self.leads:
                return

    async def _take(self, *, again: bool = False) -> None:
        """Tries until the Lease is ours; ``again``: or until somebody else has it."""
        while True:
            if await self._try() or (again and not self.leads):
                return
            await asyncio.sleep(self._times.retry)

    async def _try(self) -> bool:
        """One attempt to take or renew; True when it is ours for another duration."""
        path = (self._lease.namespace, self._lease.name)
        try:
            live = await self._cluster.get(LEASE, *path)
            wanted = claim(
                live,
                self._seen,
                self._identity,
                self._times,
                now=time.monotonic(),
                wall_clock=time.time(),
            )
            self._seen = wanted.seen
            if wanted.body is None:
                self._tell(wanted.holder)
                return False
            await self._write(live, wanted.body)
        except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.warning("lease %s/%s: %s", *path, error)
            return False
        self.holder = self._identity
        return True

    async def _write(self, live: Json | None, body: Json) -> None:
        if live is None:
            kind = {"apiVersion": LEASE.api_version, "kind": LEASE.kind}
            metadata = {"name": self._lease.name, "namespace": self._lease.namespace}
            await self._cluster.create(
                LEASE, self._lease.namespace, {**kind, "metadata": metadata, **body}
            )
        else:
            await self._cluster.replace(LEASE, body)

    def _tell(self, holder: str | None) -> None:
        if holder != self.holder:
            logger.info("standby: %s leads", holder)
        self.holder = holder

    async def _give_up(self) -> None:
        """By the leader at its end; if it fails, the Lease expires."""
        try:
            live = await self._cluster.get(LEASE, self._lease.namespace, self._lease.name)
            if live is not None and live["spec"].get("holderIdentity") == self._identity:
                await self._cluster.replace(LEASE, release(live))
        except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.warning("the Lease was not given back: %s", error)
