"""One worker per LLMDeployment: runs its passes one after the other.

In: keys and triggers. Out: calls of the pass function, never two at once for one key; at once after
a trigger, otherwise as often as the last pass asked for; after an error with growing pauses. A
trigger carries no content, because every pass reads the cluster anew. Knows nothing of Kubernetes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

logger = logging.getLogger(__name__)

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0


class Key(NamedTuple):
    namespace: str
    name: str


# Seconds until the next pass is due; None when the object is gone.
Pass = Callable[[Key], Awaitable[float | None]]


class Workers:
    def __init__(self, run_pass: Pass, *, first_pause: float = FIRST_PAUSE) -> None:
        self._run_pass = run_pass
        self._first_pause = first_pause
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._triggers: dict[Key, asyncio.Event] = {}

    def trigger(self, key: Key) -> None:
        """Asks for a pass soon, and starts the key's worker when there is none."""
        if key not in self._tasks:
            self._triggers[key] = asyncio.Event()
            self._tasks[key] = asyncio.create_task(
                self._work(key), name=f"{key.namespace}/{key.name}"
            )
        self._triggers[key].set()

    def nudge(self, key: Key) -> None:
        """Asks for a pass when the key has a worker: a child alone does not make one."""
        if key in self._triggers:
            self._triggers[key].set()

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, key: Key) -> None:
        trigger, pause = self._triggers[key], self._first_pause
        try:
            while True:
                trigger.clear()
                try:
                    due = await self._run_pass(key)
                except Exception as error:
                    logger.warning("%s/%s: %s; again in %g s", *key, error, pause, exc_info=True)
                    # No trigger shortens this pause: the failing write may be what triggers.
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, LONGEST_PAUSE)
                    continue
                if due is None:
                    if trigger.is_set():
                        continue  # a new object of the same name
                    return
                pause = self._first_pause
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(trigger.wait(), due)
        finally:
            del self._tasks[key], self._triggers[key]
