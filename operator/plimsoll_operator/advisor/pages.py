"""The metrics pages of an advisor's pods.

In: an advisor and pods. Out: a reading, or the reason why there is none, by pod. A page is asked for
at the pod's own address, without credentials.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

import aiohttp

from plimsoll_operator.advisor.observed import AdvisedPod
from plimsoll_operator.advisor.spec import Advisor
from plimsoll_operator.scrape import scrape_page, url_host
from plimsoll_operator.tuning.values import EngineReading, Unknown, UnknownReason

# vLLM's own.
DEFAULT_PORT = 8000
# Together with the longest interval this leaves a pass well before the next one is due.
LONGEST_WAIT = 10.0


class Pages(Protocol):
    async def read(
        self, advisor: Advisor, pods: Iterable[AdvisedPod]
    ) -> dict[str, EngineReading | Unknown]:
        """By pod name."""


def page_url(advisor: Advisor, pod: AdvisedPod) -> str | Unknown:
    """Where the page of a pod is, or why nobody can tell."""
    metrics, port = advisor.metrics, advisor.metrics.port
    if pod.no_container:
        message = f"it has no container {advisor.container} (spec.container)"
        return Unknown(UnknownReason.UNREACHABLE, pod.name, message)
    if pod.pod.ip is None:
        return Unknown(UnknownReason.NOT_READY, pod.name, "it has no address yet")
    if isinstance(port, str):
        number = dict(pod.ports).get(port)
        if number is None:
            message = f"its container has no port named {port} (spec.metrics.port)"
            return Unknown(UnknownReason.UNREACHABLE, pod.name, message)
    else:
        number = port or pod.flags.port or DEFAULT_PORT
    scheme = "https" if metrics.tls else "http"
    return f"{scheme}://{url_host(pod.pod.ip)}:{number}{metrics.path}"


class RemotePages:
    """Those in the cluster's pods. Holds an HTTP session: ``close`` when done; needs a running event
    loop."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession()

    async def close(self) -> None:
        await self._session.close()

    async def read(
        self, advisor: Advisor, pods: Iterable[AdvisedPod]
    ) -> dict[str, EngineReading | Unknown]:
        pods = tuple(pods)
        pages = await asyncio.gather(*(self._read(advisor, pod) for pod in pods))
        return {pod.name: page for pod, page in zip(pods, pages, strict=True)}

    async def _read(self, advisor: Advisor, pod: AdvisedPod) -> EngineReading | Unknown:
        url = page_url(advisor, pod)
        if isinstance(url, Unknown):
            return url
        return await scrape_page(
            self._session,
            url=url,
            pod=pod.name,
            model=advisor.metrics.model,
            within=min(0.8 * advisor.metrics.interval, LONGEST_WAIT),
            # A certificate is made out to a name, and a pod is asked at its address.
            verify=False,
        )
