"""Case B02, second half: of two operators one works, and the other takes over when it is killed."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import pytest

from support.apiserver import ApiServer, OperatorProcess, until
from support.kubelet import FakeKubelet

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


async def start(server: ApiServer, identity: str) -> OperatorProcess:
    return await server.start_operator(
        "--leader-elect", f"--lease-namespace={server.namespace}", f"--identity={identity}"
    )


async def ask(operator: OperatorProcess, path: str) -> tuple[int, str]:
    """Status 0 while nothing listens."""
    url = f"http://127.0.0.1:{operator.health_port}{path}"
    try:
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return answer.status, await answer.text()
    except aiohttp.ClientError:
        return 0, ""


async def wait_for_readiness(operator: OperatorProcess, wanted: str) -> None:
    async def says() -> bool:
        return await ask(operator, "/readyz") == (200, f"{wanted}\n")

    await until(says, 30)


async def test_b02_one_works_and_the_other_takes_over(
    server: ApiServer, kubelet: FakeKubelet
) -> None:
    first = await start(server, "first")
    await wait_for_readiness(first, "working")
    second = await start(server, "second")
    try:
        await wait_for_readiness(second, "standby: first leads")
        await server.create_deployment()
        await server.wait_for("Ready", within=60)
        assert "plimsoll_operator_leader 1.0" in (await ask(first, "/metrics"))[1]

        async def tells() -> bool:
            # Written before it is counted.
            page = (await ask(first, "/metrics"))[1].splitlines()
            return any(line.startswith("plimsoll_operator_condition{") for line in page)

        await until(tells, 10)
        standby = (await ask(second, "/metrics"))[1]
        assert "plimsoll_operator_leader 0.0" in standby
        assert "plimsoll_operator_condition{" not in standby
        # On standby it has asked for the Lease and written nothing.
        written = [line for line in standby.splitlines() if 'verb="P' in line]
        assert not written, written
        assert 'plimsoll_operator_api_requests_total{status="200",verb="GET"}' in standby

        await first.kill()
        killed = time.monotonic()
        await server.scale(2)

        async def scaled() -> bool:
            found: Any = await server.statefulset()
            return found is not None and found["spec"]["replicas"] == 2

        await until(scaled, 60)
        assert time.monotonic() - killed < 60
        await wait_for_readiness(second, "working")

        # Told to stop, it gives the Lease back: the next need not wait for its end.
        third = await start(server, "third")
        try:
            await wait_for_readiness(third, "standby: second leads")
            await second.stop()
            await asyncio.wait_for(wait_for_readiness(third, "working"), 10)
        finally:
            await third.stop()
        assert third.process.returncode == 0, third.log
    finally:
        await first.stop()
        await second.stop()
    assert second.process.returncode == 0, second.log
