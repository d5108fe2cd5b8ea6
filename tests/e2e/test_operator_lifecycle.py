"""One LLMDeployment from creation to deletion, on a real API server and StatefulSet controller."""

import asyncio
import base64
from typing import Any

import pytest

from plimsoll_operator import cluster as api
from support.apiserver import ApiServer, ScriptedEngines, condition_of, operator_in_process, until
from support.kubelet import (
    FakeKubelet,
    recovered,
    running,
    starting,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


Json = dict[str, Any]


IMAGE = "plimsoll/engine:0.1.0"


async def test_from_creation_to_ready(server: ApiServer, kubelet: FakeKubelet) -> None:
    kubelet.set(starting)
    async with server.operator():
        await server.create_deployment(replicas=2)
        await server.wait_for("Progressing", reason="RollingOut", within=60)
        waiting = await server.wait_for("Ready", "False")
        assert waiting["message"] == "0 of 2 replicas serve the wanted revision"

        kubelet.set(running)
        await server.wait_for("Ready")
        status = (await server.deployment())["status"]
        assert status["readySummary"] == "2/2"
        assert (status["replicas"], status["readyReplicas"]) == (2, 2)
        assert status["url"] == f"http://assistant.{server.namespace}.svc/v1"
        for condition in ("Available", "Progressing"):
            assert condition_of({"status": status}, condition)["status"] == "True"
        for condition in ("Degraded", "Stalled"):
            assert condition_of({"status": status}, condition)["status"] == "False"
        kinds = {
            *(await server.versions()),
        }
        assert kinds == {
            "LLMDeployment assistant",
            "StatefulSet assistant",
            "Service assistant",
            "Service assistant-pods",
            "Secret assistant-control",
            "ConfigMap assistant-limits",
        }
        metadata = (await server.deployment())["metadata"]
        assert "finalizers" not in metadata
        assert "annotations" not in metadata


# Case B01: idle means no write at all, and an old record of the framework changes nothing.
async def test_an_idle_operator_writes_nothing(server: ApiServer, kubelet: FakeKubelet) -> None:
    engines = ScriptedEngines()
    await server.create_deployment(engine={"maxModelLen": 2048})
    await server.merge(
        {
            "metadata": {
                "annotations": {
                    "kopf.zalando.org/handler-of-an-older-release": (
                        '{"started":"2026-01-01T00:00:00+00:00","purpose":"update","retries":0,'
                        '"success":false,"failure":false}'
                    )
                }
            }
        }
    )
    async with operator_in_process(server, engines):
        await server.wait_for("Ready", within=60)
        await asyncio.sleep(4)  # what follows the last transition
        settled = await server.versions()

        await asyncio.sleep(30)

        assert await server.versions() == settled

        # A changed metric: one write, when its interval is over, and no second one.
        engines.report["kv_cache_usage"] = 0.5
        written = set()
        for _ in range(30):
            written.add((await server.versions())["LLMDeployment assistant"])
            await asyncio.sleep(0.5)
        written.discard(settled["LLMDeployment assistant"])
        assert len(written) <= 1

        # A child that somebody changes is put right.
        await server.merge(
            {"spec": {"selector": {"app.kubernetes.io/name": "other"}}}, resource=api.SERVICE
        )

        async def repaired() -> bool:
            service = await server.get(api.SERVICE, server.namespace, "assistant")
            assert service is not None
            name: str = service["spec"]["selector"]["app.kubernetes.io/name"]
            return name == "plimsoll-engine"

        await until(repaired, 60)


# Case B02, first half: a foreign peering record with a higher priority silences nobody.
async def test_another_operators_peering_record_changes_nothing(
    server: ApiServer, kubelet: FakeKubelet
) -> None:
    await install_foreign_peering(server)
    async with server.operator():
        await server.create_deployment()
        await server.wait_for("Ready", within=60)
        await server.scale(2)

        async def scaled() -> bool:
            found = await server.statefulset()
            return found is not None and found["spec"]["replicas"] == 2

        await until(scaled, 30)


async def install_foreign_peering(server: ApiServer) -> None:
    group, plural = "kopf.dev", "clusterkopfpeerings"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    await server.install_crd(
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{plural}.{group}"},
            "spec": {
                "group": group,
                "scope": "Cluster",
                "names": {
                    "kind": "ClusterKopfPeering",
                    "plural": plural,
                    "singular": "clusterkopfpeering",
                },
                "versions": [
                    {
                        "name": "v1",
                        "served": True,
                        "storage": True,
                        "schema": {"openAPIV3Schema": schema},
                    }
                ],
            },
        }
    )
    record = {"priority": 100, "lifetime": 600, "lastseen": "2099-01-01T00:00:00+00:00"}
    await server._request(
        "POST",
        f"/apis/{group}/v1/{plural}",
        body={
            "apiVersion": f"{group}/v1",
            "kind": "ClusterKopfPeering",
            "metadata": {"name": "default"},
            "status": {"somebody-elses-operator": record},
        },
    )


# Case B04: the spec belongs to the user, and tuning survives the next apply.
async def test_the_operator_never_owns_the_spec(server: ApiServer, kubelet: FakeKubelet) -> None:
    spec = {
        "model": {"uri": "hf://org/tiny"},
        "accelerator": {"resourceName": ""},
        "monitoring": {"scrapeInterval": "1s"},
        "engine": {"maxModelLen": 8192, "gpuMemoryUtilization": 0.90},
        "tuning": {"maxModelLen": {"minAllowed": 2048}},
    }
    engines = ScriptedEngines(
        kv_cache_usage=0.99, running=8, waiting=12, preemptions_total=lambda now: now
    )

    async def admitted() -> int:
        found = await server.deployment()
        return int(found.get("status", {}).get("effective", {}).get("maxModelLen", 0))

    async with operator_in_process(server, engines):
        await server.apply_deployment(spec, manager="gitops")
        await server.wait_for("Ready", within=60)

        async def lowered() -> bool:
            return 0 < await admitted() < 8192

        await until(lowered, 60)

        resource = await server.deployment()
        stored = dict(resource["spec"])
        assert stored.pop("replicas") == 1, "the schema's default, which the scale needs"
        assert stored == spec
        for entry in resource["metadata"]["managedFields"]:
            if entry["manager"] == "plimsoll-operator":
                assert list(entry["fieldsV1"]) == ["f:status"]
                assert entry["subresource"] == "status"

        before = await admitted()
        await server.apply_deployment(spec, manager="gitops")
        await asyncio.sleep(3)
        assert await admitted() <= before, "the same file again undoes nothing"

        await server.apply_deployment(
            {**spec, "engine": {"maxModelLen": 6144, "gpuMemoryUtilization": 0.90}},
            manager="gitops",
        )
        await server.wait_for("Stalled", "False")
        assert await admitted() <= 6144
        history = (await server.deployment())["status"]["tuning"]["history"]
        assert history
        assert any(event["reason"] == "LengthLowered" for event in await server.events())


async def test_scaling_is_followed_and_never_written_back(
    server: ApiServer, kubelet: FakeKubelet
) -> None:
    async with server.operator():
        await server.create_deployment()
        await server.wait_for("Ready", within=60)
        template = await template_hash(server)

        await server.scale(3)
        await server.wait_for("Ready")
        scale = await server._request(
            "GET", api.LLM_DEPLOYMENT.path(server.namespace, "assistant", "scale")
        )
        assert scale["status"]["replicas"] == 3
        selector = scale["status"]["selector"]
        assert len(await server.find(api.POD, server.namespace, selector)) == 3
        assert await template_hash(server) == template, "scaling replaces no pod"
        assert await server.get(api.DISRUPTION_BUDGET, server.namespace, "assistant") is not None

        await server.scale(0)
        await server.wait_for("Ready", "False", reason="ScaledToZero")

        async def gone() -> bool:
            return await server.pods() == []

        await until(gone, 20)
        assert await server.get(api.DISRUPTION_BUDGET, server.namespace, "assistant") is None


async def template_hash(server: ApiServer) -> str:
    found = await server.statefulset()
    assert found is not None
    annotation: str = found["metadata"]["annotations"]["plimsoll.dev/template-hash"]
    return annotation


async def test_a_changed_spec_rolls_the_pods_and_an_operator_restart_changes_nothing(
    server: ApiServer, kubelet: FakeKubelet
) -> None:
    engines = ScriptedEngines()
    async with operator_in_process(server, engines):
        await server.create_deployment(replicas=2, engine={"maxModelLen": 2048})
        await server.wait_for("Ready", within=60)
        await asyncio.sleep(3)
        first = {pod["metadata"]["uid"] for pod in await server.pods()}
        settled = await server.versions()
        secret = await server.get(api.SECRET, server.namespace, "assistant-control")

    async with operator_in_process(server, engines):
        await asyncio.sleep(12)
        assert await server.versions() == settled
        assert {pod["metadata"]["uid"] for pod in await server.pods()} == first

        await server.merge({"spec": {"engine": {"maxNumSeqs": 32}}})
        await server.wait_for("Ready", within=60)
        second = {pod["metadata"]["uid"] for pod in await server.pods()}
        assert first.isdisjoint(second)
        events = [e["message"] for e in await server.events() if e["reason"] == "RollingOut"]
        assert any("--max-num-seqs=256" in each and "--max-num-seqs=32" in each for each in events)
        kept = await server.get(api.SECRET, server.namespace, "assistant-control")
        assert secret is not None
        assert kept is not None
        assert kept["data"] == secret["data"], "the credentials are made once"
        assert base64.b64decode(kept["data"]["tls.crt"]).startswith(b"-----BEGIN CERTIFICATE")


async def test_an_operator_killed_in_the_middle_of_a_change_finishes_it_after_its_restart(
    server: ApiServer, kubelet: FakeKubelet
) -> None:
    kubelet.set(starting, "plimsoll/engine:next")
    first = await server.start_operator()
    try:
        await server.create_deployment(replicas=2)
        await server.wait_for("Ready", within=60)
        await server.merge({"spec": {"runtime": {"image": "plimsoll/engine:next"}}})

        async def halfway() -> bool:
            return sorted((await server.images()).values()) == [IMAGE, "plimsoll/engine:next"]

        await until(halfway, 30)
    finally:
        await first.kill()

    await server.merge({"spec": {"replicas": 3, "engine": {"maxNumSeqs": 64}}})
    kubelet.set(running, "plimsoll/engine:next")
    async with server.operator():
        await server.wait_for("Ready", within=60)
        assert list((await server.images()).values()) == ["plimsoll/engine:next"] * 3
        found = await server.statefulset()
        assert found is not None
        args = found["spec"]["template"]["spec"]["containers"][0]["args"]
        assert "--max-num-seqs=64" in args


async def test_deletion_leaves_nothing_but_learned_profiles(
    server: ApiServer, kubelet: FakeKubelet
) -> None:
    profile = {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "MemoryProfile",
        "metadata": {"name": "learned", "namespace": server.namespace},
        "spec": {
            "model": "hf://org/tiny",
            "revision": "main",
            "dtype": "auto",
            "device": "cpu unlimited",
            "tensorParallelSize": 1,
            "engine": IMAGE,
        },
    }
    await server.apply(profile)
    async with server.operator():
        await server.create_deployment(replicas=2)
        await server.wait_for("Ready", within=60)
        assert await server.get(api.DISRUPTION_BUDGET, server.namespace, "assistant") is not None

        await server.remove(api.LLM_DEPLOYMENT, "assistant")

        async def gone() -> bool:
            left = await server.versions()
            budget = await server.get(api.DISRUPTION_BUDGET, server.namespace, "assistant")
            return left == {} and budget is None and await server.pods() == []

        await until(gone, 60)
        await asyncio.sleep(3)
        assert await gone(), "nothing is made again"
        assert await server.get(api.MEMORY_PROFILE, server.namespace, "learned") is not None


async def test_every_status_field_that_is_written_is_in_the_schema(
    server: ApiServer, kubelet: FakeKubelet
) -> None:
    engines = ScriptedEngines(
        kv_cache_usage=0.99, running=8, waiting=12, preemptions_total=lambda now: now
    )
    kubelet.set(recovered(137, reason="OOMKilled"))
    written: list[Json] = []
    async with operator_in_process(server, engines):
        await server.create_deployment(
            engine={"maxModelLen": 8192},
            tuning={"maxModelLen": {"minAllowed": 1024}},
            resources={"limits": {"memory": "8Gi"}},
        )
        await server.wait_for("Ready", within=60)

        async def tuned() -> bool:
            status = (await server.deployment())["status"]
            written.append(status)
            return bool(status.get("tuning", {}).get("history")) and "oom" in status

        await until(tuned, 60)
        for entry in (await server.deployment())["metadata"]["managedFields"]:
            if entry["manager"] == "plimsoll-operator":
                fields = set(entry["fieldsV1"]["f:status"])
                assert {"f:tuning", "f:oom", "f:effective", "f:load", "f:failures"} <= fields
