"""A Job fetches the model first, on a real API server with its Job controller."""

from __future__ import annotations

import pytest

from plimsoll_operator import cluster as api
from support.apiserver import ApiServer, ScriptedEngines, operator_in_process, until
from support.kubelet import FakeKubelet, crashed, succeeded

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

IMAGE = "plimsoll/engine:fetches"
JOB = "assistant-prefetch"


async def test_pods_come_after_the_model_and_stay_through_a_failed_fetch_of_another(
    server: ApiServer, kubelet: FakeKubelet
) -> None:
    cache = {"claimName": "models", "prefetch": True}
    failed = crashed(1, '{"class": "ModelLoadFailed", "message": "no such model"}')
    async with operator_in_process(server, ScriptedEngines()):
        kubelet.set(failed, "prefetch")
        await server.create_deployment(
            model={"uri": "hf://org/tiny", "cache": cache}, runtime={"image": IMAGE}
        )
        waiting = await server.wait_for("Ready", "False", reason="Prefetching", within=60)
        assert "Job assistant-prefetch" in waiting["message"]
        assert await server.statefulset() is None

        kubelet.set(succeeded, "prefetch")
        await server.wait_for("Ready", within=60)
        before = {pod["metadata"]["uid"] for pod in await server.pods()}

        # Another model is another Job; what serves stays until it is there.
        kubelet.set(failed, "prefetch")
        await server.merge({"spec": {"model": {"uri": "hf://org/other"}}})
        waiting = await server.wait_for("Ready", "False", reason="Prefetching", within=60)
        found = await server.statefulset()
        assert found is not None
        assert "--model=org/tiny" in str(found["spec"]["template"])

        # The Job before is deleted first, and between the two there is none.
        async def other() -> bool:
            job = await server.get(api.JOB, server.namespace, JOB)
            return job is not None and "--model=org/other" in str(job["spec"]["template"])

        await until(other, 30)
        assert {
            pod["metadata"]["uid"] for pod in await server.pods() if not _fetches(pod)
        } <= before

        await server.merge({"spec": {"model": {"cache": {"prefetch": False}}}})

        async def gone() -> bool:
            return await server.get(api.JOB, server.namespace, JOB) is None

        await until(gone, 30)


def _fetches(pod: dict[str, dict[str, str]]) -> bool:
    return pod["metadata"]["name"].startswith(JOB)
