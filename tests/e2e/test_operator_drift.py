"""What others change in the children, or already have, on a real API server."""

import asyncio
from typing import Any

import pytest

from plimsoll_operator import cluster as api
from plimsoll_operator.cluster import Cluster
from support.apiserver import ApiServer, ScriptedEngines, operator_in_process, until
from support.kubelet import (
    FakeKubelet,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


Json = dict[str, Any]


# What a passer-by does, as (kind, suffix of the name, patch): a strategic merge patch, like kubectl's.
# Fields that only the server's defaults had, entries of lists, maps that are one value, and values
# of ours.
DRIFTS: list[tuple[api.Resource, str, Json]] = [
    (api.SERVICE, "", {"spec": {"selector": {"foo": "bar"}}}),
    (
        api.SERVICE,
        "",
        {
            "spec": {
                "type": "NodePort",
                "sessionAffinity": "ClientIP",
                "publishNotReadyAddresses": True,
                "externalIPs": ["192.0.2.1"],
                "ports": [{"name": "extra", "port": 81, "targetPort": 81, "nodePort": 30181}],
            }
        },
    ),
    (api.SERVICE, "-pods", {"spec": {"selector": {"foo": "bar"}, "sessionAffinity": "ClientIP"}}),
    (
        api.STATEFUL_SET,
        "",
        {
            "spec": {
                "revisionHistoryLimit": 3,
                "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete"},
                "template": {
                    "spec": {
                        "nodeSelector": {"no": "such-node"},
                        "schedulerName": "nobody",
                        "volumes": [
                            {"name": "scratch", "emptyDir": {"medium": "Memory"}},
                            {"name": "extra", "emptyDir": {}},
                        ],
                        "containers": [
                            {
                                "name": "engine",
                                "env": [
                                    {"name": "FOO", "value": "1"},
                                    {"name": "HOME", "value": "/"},
                                ],
                                "terminationMessagePath": "/dev/other",
                                "livenessProbe": {"initialDelaySeconds": 7},
                            },
                            {"name": "sidecar", "image": "example/sidecar:1"},
                        ],
                    }
                },
            }
        },
    ),
    (api.CONFIG_MAP, "-limits", {"data": {"extra": "1"}, "binaryData": {"more": "MQ=="}}),
    (api.SECRET, "-control", {"data": {"extra": "MQ=="}}),
    (api.DISRUPTION_BUDGET, "", {"spec": {"maxUnavailable": None, "minAvailable": 1}}),
]


def repairable(body: Json) -> Json:
    """What the operator owns of a child: without metadata and status."""
    return {key: part for key, part in body.items() if key not in ("metadata", "status")}


async def test_whatever_others_change_in_a_child_is_put_back_exactly_once(
    server: ApiServer, kubelet: FakeKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied: list[str] = []
    apply = Cluster.apply

    async def counted(cluster: Cluster, body: Json) -> Json:
        applied.append(f"{body['kind']} {body['metadata']['name']}")
        return await apply(cluster, body)

    monkeypatch.setattr(Cluster, "apply", counted)

    async def read(resource: api.Resource, suffix: str) -> Json:
        found = await server.get(resource, server.namespace, f"assistant{suffix}")
        assert found is not None
        return found

    async def patch(resource: api.Resource, suffix: str, body: Json) -> None:
        await server._request(
            "PATCH",
            resource.path(server.namespace, f"assistant{suffix}"),
            query=[("fieldManager", "passer-by")],
            body=body,
            content_type="application/strategic-merge-patch+json",
        )

    places = list(dict.fromkeys((resource, suffix) for resource, suffix, _ in DRIFTS))
    # Values that the server writes in another way are not drift.
    rewritten = {"containerName": "engine", "resource": "limits.memory", "divisor": "1024Ki"}
    async with operator_in_process(server, ScriptedEngines()):
        await server.create_deployment(
            replicas=2,
            engine={"maxModelLen": 2048},
            resources={"limits": {"memory": "8192Mi", "cpu": "1000m"}},
            podTemplate={"env": [{"name": "MEM", "valueFrom": {"resourceFieldRef": rewritten}}]},
        )
        await server.wait_for("Ready", within=60)
        await asyncio.sleep(4)
        applied.clear()
        await asyncio.sleep(4)
        assert applied == [], "an idle operator applies nothing"
        wanted = {place: repairable(await read(*place)) for place in places}

        async def repaired() -> bool:
            return all([repairable(await read(*place)) == wanted[place] for place in places])

        for resource, suffix, body in DRIFTS:
            applied.clear()
            await patch(resource, suffix, body)
            try:
                await until(repaired, 20)
            except TimeoutError:
                for place in places:
                    assert repairable(await read(*place)) == wanted[place]
            await asyncio.sleep(3)
            child = f"{resource.kind} assistant{suffix}"
            assert applied.count(child) == 1, f"{child} was repaired once: {applied}"

        # Others may add labels and annotations, and `kubectl rollout restart` is one of those.
        restart = {"annotations": {"kubectl.kubernetes.io/restartedAt": "2026-01-01T00:00:00Z"}}
        await server.wait_for("Ready", within=60)
        before = {pod["metadata"]["uid"] for pod in await server.pods()}
        await patch(api.STATEFUL_SET, "", {"spec": {"template": {"metadata": restart}}})
        await patch(api.SERVICE, "", {"metadata": {"labels": {"team": "a"}}})

        async def restarted() -> bool:
            pods = [
                pod for pod in await server.pods() if "deletionTimestamp" not in pod["metadata"]
            ]
            return len(pods) == 2 and before.isdisjoint(pod["metadata"]["uid"] for pod in pods)

        await until(restarted, 60)
        assert (await read(api.SERVICE, ""))["metadata"]["labels"]["team"] == "a"

        # Even where nobody can tell any more who set what.
        lost = {
            "metadata": {"managedFields": [{}]},
            "spec": {"selector": {"foo": "bar"}, "type": "NodePort"},
        }
        await patch(api.SERVICE, "", lost)

        async def service_repaired() -> bool:
            return repairable(await read(api.SERVICE, "")) == wanted[api.SERVICE, ""]

        await until(service_repaired, 20)
        applied.clear()
        await asyncio.sleep(5)
        assert "Service assistant" not in applied


async def test_what_the_server_refuses_is_shown_and_not_tried_in_a_tight_loop(
    server: ApiServer, kubelet: FakeKubelet
) -> None:
    async with server.operator():
        await server.create_deployment(podTemplate={"affinity": {"nodeAffinity": "wrong"}})
        stalled = await server.wait_for("Stalled", reason="Refused", within=60)
        assert "StatefulSet assistant" in stalled["message"]
        assert "nodeAffinity" in stalled["message"]
        await server.merge({"spec": {"podTemplate": None}})
        await server.wait_for("Ready", within=60)


async def test_somebody_elses_service_is_left_alone(
    server: ApiServer, kubelet: FakeKubelet
) -> None:
    await server.create(
        api.SERVICE,
        server.namespace,
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "assistant"},
            "spec": {"ports": [{"port": 5432}]},
        },
    )
    async with server.operator():
        await server.create_deployment()
        stalled = await server.wait_for("Stalled", reason="NameConflict", within=60)
        assert "Service assistant" in stalled["message"]
        service = await server.get(api.SERVICE, server.namespace, "assistant")
        assert service is not None
        assert service["spec"]["ports"][0]["port"] == 5432
        assert await server.statefulset() is None


async def test_a_child_that_was_stripped_of_owner_and_label_is_taken_back_by_its_label(
    server: ApiServer, kubelet: FakeKubelet
) -> None:
    async with server.operator():
        await server.create_deployment()
        await server.wait_for("Ready", within=60)
        name = "assistant-pods"
        stripped = {"ownerReferences": None, "labels": None}
        await server.merge({"metadata": stripped}, resource=api.SERVICE, name=name)
        stalled = await server.wait_for("Stalled", reason="NameConflict", within=60)
        way_out = f"kubectl label service {name} plimsoll.dev/deployment=assistant --overwrite"
        assert way_out in stalled["message"]

        labels = {"plimsoll.dev/deployment": "assistant"}
        await server.merge({"metadata": {"labels": labels}}, resource=api.SERVICE, name=name)
        await server.wait_for("Stalled", "False")
        await server.wait_for("Ready")
        service = await server.get(api.SERVICE, server.namespace, name)
        assert service is not None
        (owner,) = service["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"]) == ("LLMDeployment", "assistant")
