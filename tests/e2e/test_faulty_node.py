"""A faulty GPU under the real StatefulSet controller: its pod is made elsewhere, no other is touched."""

from __future__ import annotations

import json

import pytest

from plimsoll_operator import cluster as api
from plimsoll_operator import names
from support.apiserver import ApiServer, ScriptedEngines, operator_in_process, until
from support.kubelet import FakeKubelet, Json, crashed, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FAULT = json.dumps({"class": "GPUFault", "phase": "serving", "message": "Xid 79 on 0000:3b:00"})


async def test_the_pod_of_a_faulty_gpu_alone_is_made_anew_and_kept_from_its_node(
    server: ApiServer, kubelet: FakeKubelet
) -> None:
    broken: set[str] = set()

    def behave(pod: Json) -> Json:
        dead = pod["metadata"]["uid"] in broken
        return crashed(1, FAULT)(pod) if dead else running(pod)

    async def uids() -> dict[str, str]:
        pods = await server.pods()
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}

    kubelet.set(behave)
    async with operator_in_process(server, ScriptedEngines()):
        await server.create_deployment(replicas=2, rollout={"soak": "0s", "canary": "Off"})
        await server.wait_for("Ready", within=60)
        before = await uids()
        for pod in await server.pods():
            await server._request(
                "POST",
                api.POD.path(server.namespace, pod["metadata"]["name"], "binding"),
                body={
                    "metadata": {"name": pod["metadata"]["name"]},
                    "target": {"kind": "Node", "name": f"node-{pod['metadata']['name'][-1]}"},
                },
            )
        broken.add(before["assistant-1"])
        kubelet.set(lambda pod: behave(pod))

        async def made_anew() -> bool:
            return (await uids()).get("assistant-1", "") not in ("", before["assistant-1"])

        await until(made_anew, 60)
        await server.wait_for("Ready", within=60)
        status = (await server.deployment())["status"]
        (avoided,) = status["avoidedNodes"]
        assert (avoided["node"], avoided["pod"]) == ("node-1", "assistant-1")
        after = await uids()
        assert after["assistant-0"] == before["assistant-0"], "a pod that serves is left alone"
        (moved,) = [p for p in await server.pods() if p["metadata"]["name"] == "assistant-1"]
        assert "node-1" in json.dumps(moved["spec"]["affinity"])
        assert status["updatedReplicas"] == 2
        assert any(event["reason"] == "NodeAvoided" for event in await server.events())

        # A user who trusts the node again rolls nothing.
        await server.merge({"metadata": {"annotations": {names.TRUSTED_NODES: "node-1"}}})

        async def trusted() -> bool:
            found = await server.statefulset()
            assert found is not None
            return "affinity" not in found["spec"]["template"]["spec"]

        await until(trusted, 30)
        await server.wait_for("Ready", within=30)
        assert await uids() == after
        assert not (await server.deployment())["status"].get("avoidedNodes")

        # The next template rolls both, as ever.
        await server.merge({"spec": {"engine": {"maxNumSeqs": 32}}})

        async def rolled() -> bool:
            now = await uids()
            return len(now) == 2 and set(now.values()).isdisjoint(after.values())

        await until(rolled, 90)
        await server.wait_for("Ready", within=60)
        found = await server.statefulset()
        assert found is not None
        assert found["spec"]["updateStrategy"]["type"] == "RollingUpdate"
