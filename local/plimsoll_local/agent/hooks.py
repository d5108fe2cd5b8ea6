"""What may run around a container's life: postStart and preStop.

In: a lifecycle handler of the pod spec. Out: None, or what went wrong as text.
"""

from __future__ import annotations

import asyncio

import aiohttp

from plimsoll_local.agent.api import Json
from plimsoll_local.agent.probes import Execute, try_http


async def run_hook(
    hook: Json,
    container: Json,
    address: str,
    session: aiohttp.ClientSession,
    execute: Execute,
    seconds: float,
) -> str | None:
    """Runs one handler to its end, for at most ``seconds``."""
    if "exec" in hook:
        try:
            result = await execute(hook["exec"]["command"], seconds)
        except TimeoutError:
            return f"hook did not end within {seconds:g}s"
        if result.exit_code != 0:
            return f"exited with {result.exit_code}: {result.output}"
        return None
    if "httpGet" in hook:
        outcome = await try_http(hook["httpGet"], container, address, session, seconds)
        return None if outcome.success else outcome.message
    if "sleep" in hook:
        await asyncio.sleep(min(float(hook["sleep"]["seconds"]), seconds))
        return None
    return f"hooks of type {', '.join(sorted(hook))} are not supported by this node agent"
