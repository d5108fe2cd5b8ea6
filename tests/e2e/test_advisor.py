"""A Deployment that runs vLLM already is advised and never written, on a real API server."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from plimsoll_operator import cluster as api
from plimsoll_operator.advisor.spec import Advisor
from plimsoll_operator.cluster import ApiError, Resource
from support.advising import vllm_page
from support.apiserver import ApiServer, ScriptedEngines, condition_of, operator_in_process, until
from support.kubelet import FakeKubelet, recovered

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

Json = dict[str, Any]
REPLICA_SET = Resource("apps/v1", "ReplicaSet", "replicasets")
ADVISORS = api.MEMORY_ADVISOR
METRICS = {"interval": "1s"}
ROOT = Path(__file__).parents[2]


@dataclass
class VllmPage:
    """Serves what a vLLM server would, on loopback: every pod of a test has that address."""

    port: int = 0
    page: Json = field(default_factory=dict)
    looks: int = 0

    async def answer(self, _: web.Request) -> web.Response:
        self.looks += 1
        page = {"steps": float(self.looks), **self.page}
        # Every look at a burst sees more preemptions.
        if "preemptions" in page:
            page["preemptions"] = float(self.looks)
        return web.Response(text=vllm_page(**page))


@pytest.fixture
async def vllm() -> AsyncIterator[VllmPage]:
    vllm = VllmPage()
    app = web.Application()
    app.router.add_get("/metrics", vllm.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    vllm.port = runner.addresses[0][1]
    yield vllm
    await runner.cleanup()


async def create(server: ApiServer, resource: Resource, body: Json) -> Json:
    """By the team: the operator's own client would leave the operator's name on it."""
    query = [("fieldManager", "team")]
    return await server._request("POST", resource.path(server.namespace), query=query, body=body)


async def create_advisor(server: ApiServer, name: str = "advisor", **spec: Any) -> Json:
    return await create(
        server,
        ADVISORS,
        {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "MemoryAdvisor",
            "metadata": {"name": name},
            "spec": {"targetRef": {"kind": "Deployment", "name": "vllm"}, **spec},
        },
    )


async def create_deployment(server: ApiServer, port: int) -> None:
    """As a team has it, with vLLM in a script."""
    labels = {"app": "vllm"}
    script = "exec vllm serve org/m --max-model-len 32768 --max-num-seqs ${SEQS} --port ${PORT}"
    container = {
        "name": "server",
        "image": "vllm/vllm-openai:v0.19.0",
        "command": ["sh", "-c", script],
        "env": [{"name": "SEQS", "value": "256"}, {"name": "PORT", "value": str(port)}],
        "resources": {"limits": {"nvidia.com/gpu": "1", "memory": "64Gi"}},
    }
    await create(
        server,
        api.DEPLOYMENT,
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "vllm"},
            "spec": {
                "replicas": 2,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
            },
        },
    )


async def advisor(server: ApiServer, name: str = "advisor") -> Json:
    found = await server.get(ADVISORS, server.namespace, name)
    assert found is not None
    return found


async def wait_for(server: ApiServer, condition: str, status: str, reason: str) -> Json:
    found: Json = {}

    async def holds() -> bool:
        nonlocal found
        resource = await advisor(server)
        found = condition_of(resource, condition)
        wanted = {"status": status, "reason": reason}
        wanted["observedGeneration"] = resource["metadata"]["generation"]
        return wanted.items() <= found.items()

    try:
        await until(holds, 30)
    except TimeoutError:
        raise AssertionError(f"{condition} is not {status} {reason}: {found}") from None
    return found


async def of_the_team(server: ApiServer) -> list[Json]:
    """Everything that the advisor reads, and what makes it."""
    found = []
    for resource in (api.DEPLOYMENT, REPLICA_SET, api.POD):
        found += await server.find(resource, server.namespace, "")
    return found


def versions(bodies: list[Json]) -> dict[str, tuple[str, int | None]]:
    metadata = (body["metadata"] for body in bodies)
    return {m["name"]: (m["resourceVersion"], m.get("generation")) for m in metadata}


async def test_a_plain_deployment_is_advised_and_never_written(
    server: ApiServer, kubelet: FakeKubelet, vllm: VllmPage
) -> None:
    kubelet.address = "127.0.0.1"
    async with operator_in_process(server, ScriptedEngines()):
        # Advice without a target is a condition, and comes by itself when there is one.
        await create_advisor(server, metrics=METRICS)
        missing = await wait_for(server, "Ready", "False", "NotFound")
        assert missing["message"] == f"there is no Deployment vllm in namespace {server.namespace}"

        await create_deployment(server, vllm.port)
        await wait_for(server, "Ready", "True", "Advising")
        status = (await advisor(server))["status"]
        assert status["podsSummary"] == "2/2"
        assert status["current"]["maxModelLen"] == 32768
        assert status["current"]["maxNumSeqs"] == 256
        assert status["current"]["gpuMemoryUtilization"] == 0.92
        assert status["current"]["sources"]["gpuMemoryUtilization"] == "Metrics"
        assert status["recommendation"]["summary"] == "as it is"

        # Idle: neither the team's objects nor the advisor is written.
        async def settled() -> bool:
            deployment = await server.get(api.DEPLOYMENT, server.namespace, "vllm")
            assert deployment is not None
            return bool(deployment["status"].get("readyReplicas") == 2)

        await until(settled, 30)
        await asyncio.sleep(2)
        before = versions([*await of_the_team(server), await advisor(server)])
        looks = vllm.looks
        await asyncio.sleep(3)
        assert vllm.looks >= looks + 4
        assert versions([*await of_the_team(server), await advisor(server)]) == before

        # A burst: fewer at once would not be preempted, and so says an Event too.
        vllm.page = {"usage": 0.99, "waiting": 30, "running": 100, "preemptions": 1}
        await wait_for(server, "ChangeAdvised", "True", "SeeRecommendation")
        (flag,) = (await advisor(server))["status"]["recommendation"]["vllmFlags"]
        assert flag.startswith("--max-num-seqs=")
        assert versions(await of_the_team(server)).items() <= before.items()

        # The kubelet kills one container at its limit: host memory, which no flag of vLLM's divides.
        vllm.page = {}
        kubelet.set(recovered(137, reason="OOMKilled"))
        oom = await wait_for(server, "OOMDetected", "True", "HostMemoryOOM")
        assert "killed at its memory limit of 64Gi" in oom["message"]

        async def both_counted() -> bool:
            return bool((await advisor(server))["status"]["oom"]["total"] == 2)

        await until(both_counted, 30)

        events = await server.find(api.EVENT, server.namespace, "")
        ours = [e for e in events if e.get("source", {}).get("component") == "plimsoll-operator"]
        assert {e["involvedObject"]["kind"] for e in ours} == {"MemoryAdvisor"}
        assert {"Advising", "ChangeAdvised", "OOM"} <= {e["reason"] for e in ours}
    for body in await of_the_team(server):
        managers = {entry["manager"] for entry in body["metadata"]["managedFields"]}
        assert not [name for name in managers if "plimsoll" in name], body["metadata"]["name"]
    (deployment,) = await server.find(api.DEPLOYMENT, server.namespace, "")
    assert deployment["metadata"]["generation"] == 1
    # Of its own object the operator owns the status alone.
    for entry in (await advisor(server))["metadata"]["managedFields"]:
        if entry["manager"] == "plimsoll-operator":
            assert entry["subresource"] == "status"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"targetRef": {"kind": "Pod", "name": "v"}}, ["spec.targetRef.kind", '"Deployment"']),
        ({"targetRef": {"kind": "Deployment"}}, ["spec.targetRef.name", "Required value"]),
        (
            {"targetRef": {"kind": "LeaderWorkerSet", "name": "v", "apiVersion": "apps/v1"}},
            ["spec.targetRef.apiVersion is apps/v1", "leaderworkerset.x-k8s.io/v1"],
        ),
        ({"metrics": {"port": 0}}, ["spec.metrics.port is 0", "from 1 to 65535"]),
        ({"metrics": {"port": "No"}}, ["spec.metrics.port is No", "the name of a port"]),
        ({"metrics": {"path": "m"}}, ["spec.metrics.path is m", "begins with /"]),
        ({"metrics": {"path": "/m?a=b"}}, ["spec.metrics.path is /m?a=b", "without query"]),
        ({"metrics": {"interval": "0s"}}, ["spec.metrics.interval is 0s", "from 1s to 1m"]),
        ({"metrics": {"scheme": "ftp"}}, ["spec.metrics.scheme", "HTTPS"]),
        (
            {"tuning": {"gpuMemoryUtilization": {"minAllowed": 0.9, "maxAllowed": 0.8}}},
            ["spec.tuning.gpuMemoryUtilization.minAllowed is 0.9", "at most maxAllowed", "0.8"],
        ),
        (
            {"tuning": {"gpuMemoryUtilization": {"minAllowed": 0}}},
            ["spec.tuning.gpuMemoryUtilization.minAllowed is 0", "from 0.05 to 1"],
        ),
        (
            {"tuning": {"maxModelLen": {"minAllowed": 2, "maxAllowed": 1}}},
            ["spec.tuning.maxModelLen.minAllowed is 2", "at most maxAllowed", "1"],
        ),
        (
            {"tuning": {"objectives": {"timeToFirstToken": "2"}}},
            ["spec.tuning.objectives.timeToFirstToken is 2", "a duration"],
        ),
        ({"container": "A"}, ["spec.container is A", "the name of a container"]),
    ],
)
async def test_a_bad_advisor_is_refused_in_words_that_help(
    server: ApiServer, spec: Json, said: list[str]
) -> None:
    with pytest.raises(ApiError) as refused:
        await create_advisor(server, **copy.deepcopy(spec))
    assert refused.value.status == 422
    for words in said:
        assert words in str(refused.value)


async def test_another_target_is_another_advisor(server: ApiServer) -> None:
    await create_advisor(server, metrics={"port": "http"})
    with pytest.raises(ApiError, match="another target is another MemoryAdvisor"):
        await server.merge(
            {"spec": {"targetRef": {"kind": "Deployment", "name": "other"}}}, "advisor", ADVISORS
        )


async def test_the_example_is_accepted(server: ApiServer) -> None:
    manifest = yaml.safe_load((ROOT / "manifests" / "memoryadvisor.yaml").read_text())
    strict = [("fieldValidation", "Strict"), ("dryRun", "All")]
    created = await server._request(
        "POST", ADVISORS.path(server.namespace), query=strict, body=manifest
    )
    assert created["spec"] == manifest["spec"]
    assert Advisor.parse(created).metrics.interval == 15
