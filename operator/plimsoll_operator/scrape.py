"""Fetches the metrics page of an engine pod.

In: an HTTP session, a pod, the deployment. Out: an EngineReading, or Unknown with its reason; no
exception of the network ever comes out.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import aiohttp

from plimsoll_operator import names
from plimsoll_operator.metrics_page import read_page
from plimsoll_operator.observed import Pod
from plimsoll_operator.spec import Deployment
from plimsoll_operator.tuning.values import EngineReading, Unknown, UnknownReason

MAX_PAGE_BYTES = 8 * 1024 * 1024


async def scrape(
    session: aiohttp.ClientSession,
    pod: Pod,
    deployment: Deployment,
    *,
    clock: Callable[[], float] = time.time,
) -> EngineReading | Unknown:
    """Reads one pod once, within four fifths of the scrape interval."""
    if pod.ip is None:
        return Unknown(UnknownReason.NOT_READY, pod.name, "it has no address yet")
    return await scrape_page(
        session,
        url=f"http://{url_host(pod.ip)}:{names.HTTP_PORT}/metrics",
        pod=pod.name,
        model=deployment.model.served_name,
        within=0.8 * deployment.scrape_interval,
        clock=clock,
    )


async def scrape_page(
    session: aiohttp.ClientSession,
    *,
    url: str,
    pod: str,
    model: str | None,
    within: float,
    verify: bool = True,
    clock: Callable[[], float] = time.time,
) -> EngineReading | Unknown:
    """Reads the page at ``url``; ``within`` seconds cover connecting and the whole answer. A redirection
    is not followed: nobody else is asked on a pod's word. ``verify`` is about the certificate."""
    try:
        timeout = aiohttp.ClientTimeout(total=within)
        async with session.get(url, timeout=timeout, allow_redirects=False, ssl=verify) as response:
            if response.status != 200:
                message = f"{url} answered {response.status}"
                return Unknown(UnknownReason.BAD_STATUS, pod, message)
            body = await response.content.read(MAX_PAGE_BYTES)
            while not response.content.at_eof() and len(body) < MAX_PAGE_BYTES:
                body += await response.content.read(MAX_PAGE_BYTES - len(body))
            at = clock()
    except TimeoutError:
        return Unknown(UnknownReason.TIMED_OUT, pod, f"{url} did not answer within {within:g} s")
    except (aiohttp.ClientError, OSError) as error:
        return Unknown(UnknownReason.UNREACHABLE, pod, f"{url}: {error or type(error).__name__}")
    if len(body) >= MAX_PAGE_BYTES:
        message = f"{url} is longer than {MAX_PAGE_BYTES} bytes"
        return Unknown(UnknownReason.UNREADABLE, pod, message)
    return read_page(body.decode(errors="replace"), pod=pod, model=model, at=at)


def url_host(ip: str) -> str:
    """An address as a URL has it."""
    return f"[{ip}]" if ":" in ip else ip
