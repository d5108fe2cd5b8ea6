"""Kinds of other projects on a real API server: LeaderWorkerSet and InferencePool, there and not there.

Their definitions are those of the releases; LeaderWorkerSet's controller is a stand-in
(support/leader_worker_sets.py), and no gateway looks at the pools.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from plimsoll_operator import cluster as api
from plimsoll_operator import names
from support import definitions
from support.apiserver import CRD, ApiServer, ScriptedEngines, operator_in_process, until
from support.definitions import Definition
from support.kubelet import FakeKubelet, running, starting
from support.leader_worker_sets import LeaderWorkerSets

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

Json = dict[str, Any]
GROUPS = {"tensor": 2, "nodes": 2}
POOL = {"endpointPickerRef": {"name": "epp"}}
OLD, NEW = "plimsoll/engine:0.1.0", "plimsoll/engine:new"


@asynccontextmanager
async def installed(server: ApiServer, definition: Definition) -> AsyncIterator[None]:
    """The other tests are to find the cluster without it."""
    body = definition.read()
    await server.install_crd(body)
    try:
        yield
    finally:
        await server._request("DELETE", f"{CRD}/{body['metadata']['name']}")


async def images(server: ApiServer) -> dict[str, str]:
    return {
        pod["metadata"]["name"]: pod["spec"]["containers"][0]["image"]
        for pod in await server.pods()
        if "deletionTimestamp" not in pod["metadata"]
    }


async def test_groups_come_when_the_kind_does_and_roll_one_by_one(
    server: ApiServer, kubelet: FakeKubelet
) -> None:
    await server.create_deployment(
        replicas=2,
        parallelism=GROUPS,
        runtime={"image": OLD},
        # The length of the prompt that a canary gets.
        engine={"maxModelLen": 2048},
    )
    async with operator_in_process(server, ScriptedEngines()):
        stalled = await server.wait_for("Stalled", reason="LeaderWorkerSetNotInstalled", within=60)
        assert "kubectl apply --server-side" in stalled["message"]
        assert await server.pods() == []

        async with installed(server, definitions.LEADER_WORKER_SET):
            with LeaderWorkerSets(server.kubeconfig, server.namespace):
                await server.wait_for("Ready", within=60)
                assert set(await images(server)) == {
                    "assistant-group-0",
                    "assistant-group-0-1",
                    "assistant-group-1",
                    "assistant-group-1-1",
                }
                status = (await server.deployment())["status"]
                assert (status["replicas"], status["readySummary"]) == (2, "2/2")
                assert f"{names.ROLE_LABEL}=leader" in status["selector"]
                await idle_writes_nothing(server)

                # A new template: one group first, and it gets no further while that is not ready.
                kubelet.set(starting, of=NEW)
                await server.merge({"spec": {"runtime": {"image": NEW}}})
                await until(
                    lambda: have(server, NEW, "assistant-group-1", "assistant-group-1-1"), 60
                )
                await asyncio.sleep(2)
                now = await images(server)
                assert {name for name, image in now.items() if image == OLD} == {
                    "assistant-group-0",
                    "assistant-group-0-1",
                }
                rollout = (await server.deployment())["status"]["rollout"]
                assert rollout["step"] == "Canary"
                assert rollout["canary"]["pod"] == "assistant-group-1"

                kubelet.set(running, of=NEW)
                await until(lambda: have(server, NEW, *now), 90)
                await server.wait_for("Ready", within=60)

                # One pod for each replica again.
                await server.merge({"spec": {"parallelism": {"nodes": 1}}})
                await server.wait_for("Ready", within=60)

                async def single() -> bool:
                    return set(await images(server)) == {"assistant-0", "assistant-1"}

                await until(single, 60)
                group = names.group("assistant")
                assert await server.get(api.LEADER_WORKER_SET, server.namespace, group) is None


async def have(server: ApiServer, image: str, *pods: str) -> bool:
    found = await images(server)
    return all(found.get(pod) == image for pod in pods)


async def idle_writes_nothing(server: ApiServer) -> None:
    """After the last transition: neither the LLMDeployment nor the LeaderWorkerSet is written."""

    async def versions() -> tuple[Any, ...]:
        group = await server.get(api.LEADER_WORKER_SET, server.namespace, names.group("assistant"))
        assert group is not None
        return await server.versions(), group["metadata"]["resourceVersion"]

    await asyncio.sleep(4)
    settled = await versions()
    await asyncio.sleep(6)
    assert await versions() == settled


async def test_a_pool_comes_and_goes_with_its_field(
    server: ApiServer, kubelet: FakeKubelet
) -> None:
    async def pool() -> Json | None:
        return await server.get(api.INFERENCE_POOL, server.namespace, "assistant")

    await server.create_deployment(inferencePool=POOL)
    async with operator_in_process(server, ScriptedEngines()):
        degraded = await server.wait_for("Degraded", reason="InferencePoolNotInstalled", within=60)
        assert "kubectl apply --server-side" in degraded["message"]
        # The engines serve without it.
        await server.wait_for("Ready")

        async with installed(server, definitions.INFERENCE_POOL):

            async def made() -> bool:
                return await pool() is not None

            await until(made, 30)
            await server.wait_for("Degraded", "False")
            found = await pool()
            assert found is not None
            selector = found["spec"]["selector"]["matchLabels"].items()
            (pod,) = await server.pods()
            assert selector <= pod["metadata"]["labels"].items()
            assert found["spec"]["endpointPickerRef"]["kind"] == "Service"

            async def unmade() -> bool:
                return await pool() is None

            await server.merge({"spec": {"inferencePool": None}})
            await until(unmade, 30)

            async def forgotten() -> bool:
                return "inferencePool" not in (await server.deployment())["status"]

            await until(forgotten, 30)
