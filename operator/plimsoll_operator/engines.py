"""All engines of one deployment at once: reads their metrics and moves their limits.

In: pods. Out: a reading or the reason why there is none, and each pod's answer to its new limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

import aiohttp

from plimsoll_operator.control import control_address, set_limits
from plimsoll_operator.observed import Credentials, Pod
from plimsoll_operator.plan.canary import Probe
from plimsoll_operator.probe import Probes
from plimsoll_operator.scrape import scrape
from plimsoll_operator.spec import Deployment
from plimsoll_operator.tuning.values import EngineReading, Limits, LimitsOutcome, Unknown


class Engines(Protocol):
    async def read(
        self, deployment: Deployment, pods: Iterable[Pod]
    ) -> dict[str, EngineReading | Unknown]:
        """By pod name."""

    async def set_limits(
        self, pods: Iterable[Pod], credentials: Credentials, revision: int, limits: Limits
    ) -> dict[str, LimitsOutcome]:
        """By pod name; pods without an address are left out."""

    def probe(
        self, deployment: Deployment, pod: Pod, *, tokens: int, api_key: str | None
    ) -> Probe | None:
        """Sends the pod a prompt of that length, or asks what became of it; None while it runs."""


class RemoteEngines:
    """The engines in the cluster's pods. Holds an HTTP session: ``close`` when done; needs a
    running event loop."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession()
        self._probes = Probes(self._session)

    async def close(self) -> None:
        await self._probes.stop()
        await self._session.close()

    async def read(
        self, deployment: Deployment, pods: Iterable[Pod]
    ) -> dict[str, EngineReading | Unknown]:
        pods = tuple(pods)
        readings = await asyncio.gather(*(scrape(self._session, pod, deployment) for pod in pods))
        return {pod.name: reading for pod, reading in zip(pods, readings, strict=True)}

    async def set_limits(
        self, pods: Iterable[Pod], credentials: Credentials, revision: int, limits: Limits
    ) -> dict[str, LimitsOutcome]:
        calls = [
            set_limits(
                control_address(pod.ip), credentials, pod=pod.name, revision=revision, limits=limits
            )
            for pod in pods
            if pod.ip is not None
        ]
        return {outcome.pod: outcome for outcome in await asyncio.gather(*calls)}

    def probe(
        self, deployment: Deployment, pod: Pod, *, tokens: int, api_key: str | None
    ) -> Probe | None:
        if pod.ip is None:
            return None
        return self._probes.ask(deployment, pod, tokens=tokens, api_key=api_key)
