import asyncio
from collections.abc import Callable

import pytest

from plimsoll_operator.workers import Key, Workers

KEY = Key("default", "assistant")


async def until(condition: Callable[[], bool]) -> None:
    """Lets the other tasks run until the condition holds."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never held")


async def test_a_trigger_runs_a_pass_and_the_next_one_waits_until_it_is_due() -> None:
    passes: list[Key] = []

    async def run(key: Key) -> float | None:
        passes.append(key)
        return 3600.0

    pool = Workers(run)
    pool.trigger(KEY)
    await until(lambda: passes == [KEY])
    pool.trigger(KEY)
    await until(lambda: passes == [KEY, KEY])
    await pool.stop()


async def test_a_pass_is_repeated_when_it_is_due() -> None:
    passes: list[Key] = []

    async def run(key: Key) -> float | None:
        passes.append(key)
        return 0.0

    pool = Workers(run)
    pool.trigger(KEY)
    await until(lambda: len(passes) >= 3)
    await pool.stop()


async def test_passes_of_one_key_never_overlap_and_triggers_during_one_are_not_lost() -> None:
    running, most, count, gate = 0, 0, 0, asyncio.Event()

    async def run(key: Key) -> float | None:
        nonlocal running, most, count
        running, count = running + 1, count + 1
        most = max(most, running)
        await gate.wait()
        running -= 1
        return 3600.0

    pool = Workers(run)
    pool.trigger(KEY)
    await until(lambda: count == 1)
    pool.trigger(KEY)
    pool.trigger(KEY)
    gate.set()
    await until(lambda: count == 2)
    for _ in range(10):
        await asyncio.sleep(0)
    assert (most, count) == (1, 2)
    await pool.stop()


async def test_keys_do_not_wait_for_each_other() -> None:
    other, done = Key("default", "other"), []

    async def run(key: Key) -> float | None:
        if key == KEY:
            await asyncio.Event().wait()
        done.append(key)
        return 3600.0

    pool = Workers(run)
    pool.trigger(KEY)
    pool.trigger(other)
    await until(lambda: done == [other])
    await pool.stop()


async def test_the_worker_ends_with_its_object_and_starts_again_with_a_new_one() -> None:
    passes = 0

    async def run(key: Key) -> float | None:
        nonlocal passes
        passes += 1
        return None

    pool = Workers(run)
    pool.trigger(KEY)
    await until(lambda: passes == 1)
    for _ in range(5):
        await asyncio.sleep(0)
    pool.nudge(KEY)
    for _ in range(5):
        await asyncio.sleep(0)
    assert passes == 1, "a child alone makes no worker"
    pool.trigger(KEY)
    await until(lambda: passes == 2)
    await pool.stop()


async def test_a_failed_pass_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    passes = 0

    async def run(key: Key) -> float | None:
        nonlocal passes
        passes += 1
        if passes < 3:
            raise RuntimeError("the API server is away")
        return 3600.0

    pool = Workers(run, first_pause=0.0)
    pool.trigger(KEY)
    await until(lambda: passes == 3)
    assert "the API server is away" in caplog.text
    await pool.stop()
