"""Sends the canary of a rollout the longest prompt that it admits.

In: an HTTP session, a pod, a length, the API key. Out: a :class:`Probe`, later: a long prompt takes
its time, so it is sent beside the passes, which ask for the answer. Knows nothing of rollouts; what it
has under way may be lost, then it is sent again.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import aiohttp

from plimsoll_operator import names
from plimsoll_operator.observed import Pod
from plimsoll_operator.plan.canary import PROBE_OUTPUT_TOKENS, Probe, ProbeOutcome
from plimsoll_operator.scrape import url_host
from plimsoll_operator.spec import Deployment

# Every vocabulary has these; the lowest ids of some are control tokens.
FIRST_TOKEN, LAST_TOKEN = 16, 255
_BUSY = frozenset({429, 503})
_LONGEST_WORDS = 200


class Probes:
    """At most one under way for each pod."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._tasks: dict[str, asyncio.Task[Probe]] = {}

    def ask(
        self,
        deployment: Deployment,
        pod: Pod,
        *,
        tokens: int,
        api_key: str | None,
        port: int = names.HTTP_PORT,
    ) -> Probe | None:
        """The answer, once; None while it is under way, and it is from now on."""
        task = self._tasks.get(pod.uid)
        if task is None:
            self._tasks[pod.uid] = asyncio.create_task(
                send_probe(
                    self._session,
                    pod,
                    model=deployment.model.served_name,
                    tokens=tokens,
                    api_key=api_key,
                    within=deployment.progress_deadline,
                    port=port,
                ),
                name=f"probe of {deployment.namespace}/{pod.name}",
            )
            return None
        if not task.done():
            return None
        del self._tasks[pod.uid]
        return task.result()

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def send_probe(
    session: aiohttp.ClientSession,
    pod: Pod,
    *,
    model: str,
    tokens: int,
    api_key: str | None,
    within: float,
    port: int = names.HTTP_PORT,
    clock: Callable[[], float] = time.time,
) -> Probe:
    """One request; ``within`` seconds cover the whole answer. No exception of the network comes out."""
    assert pod.ip is not None
    began = clock()
    body = {
        "model": model,
        "prompt": _prompt(pod.uid, tokens),
        "max_tokens": PROBE_OUTPUT_TOKENS,
        "temperature": 0,
    }
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    url = f"http://{url_host(pod.ip)}:{port}/v1/completions"

    def answer(outcome: ProbeOutcome, message: str) -> Probe:
        return Probe(pod.uid, outcome, tokens, message, clock())

    asked = f"a prompt of {tokens} tokens"
    try:
        async with session.post(
            url,
            json=body,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=within),
            allow_redirects=False,
        ) as response:
            text = (await response.content.read(4096)).decode(errors="replace")
            if response.status == 200:
                took = clock() - began
                return answer(ProbeOutcome.PASSED, f"{asked} was answered in {took:.1f} s")
            words = f"{asked} was answered with {response.status}: {text[:_LONGEST_WORDS].strip()}"
            if response.status in _BUSY:
                return answer(ProbeOutcome.BUSY, words)
            refused = 300 <= response.status < 500
            return answer(ProbeOutcome.REFUSED if refused else ProbeOutcome.FAILED, words)
    except TimeoutError:
        return answer(ProbeOutcome.FAILED, f"{asked} was not answered within {within:g} s")
    except (aiohttp.ClientError, OSError) as error:
        words = str(error) or type(error).__name__
        return answer(ProbeOutcome.FAILED, f"{asked} was not answered: {words}")


def _prompt(seed: str, tokens: int) -> list[int]:
    """Of this pod alone: no prefix of it is cached."""
    return random.Random(seed).choices(range(FIRST_TOKEN, LAST_TOKEN + 1), k=tokens)
