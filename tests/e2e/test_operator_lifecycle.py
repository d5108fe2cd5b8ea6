"""One LLMDeployment from creation to deletion, on a real API server and StatefulSet controller."""

import asyncio
import base64
from typing import Any

import pytest

from plimsoll_operator import checks
from plimsoll_operator import cluster as api
from plimsoll_operator.cluster import Cluster
from plimsoll_operator.plan import retry
from plimsoll_operator.plan.canary import ProbeOutcome
from support.apiserver import ApiServer, ScriptedEngines, condition_of, operator_in_process, until
from support.kubelet import (
    FakeKubelet,
    cannot_pull,
    crashed,
    recovered,
    running,
    starting,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

Json = dict[str, Any]
IMAGE = "plimsoll/engine:0.1.0"
BAD_IMAGE = "registry.example/engine:does-not-exist"


async def pod_images(server: ApiServer) -> dict[str, str]:
    return {
        pod["metadata"]["name"]: pod["spec"]["containers"][0]["image"]
        for pod in await server.pods()
        if "deletionTimestamp" not in pod["metadata"]
    }


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


# Case B03: a flag and an image that does not exist, in one edit.
async def test_ready_is_not_true_while_a_rollout_is_stuck(
    server: ApiServer, kubelet: FakeKubelet
) -> None:
    kubelet.set(cannot_pull, BAD_IMAGE)
    async with server.operator():
        await server.create_deployment(replicas=2, rollout={"progressDeadline": "8s"})
        await server.wait_for("Ready", within=60)

        await server.merge(
            {"spec": {"runtime": {"image": BAD_IMAGE}, "engine": {"maxNumSeqs": 32}}}
        )
        progressing = await server.wait_for("Progressing", within=10)
        assert progressing["reason"] == "RollingOut"
        resource = await server.deployment()
        assert resource["status"]["observedGeneration"] == resource["metadata"]["generation"]
        assert condition_of(resource, "Ready")["status"] == "False"

        stuck = await server.wait_for("Progressing", "False", within=40)
        assert stuck["reason"] == "ProgressDeadlineExceeded"
        assert "assistant-1" in stuck["message"]
        assert BAD_IMAGE in stuck["message"]
        resource = await server.deployment()
        assert condition_of(resource, "Ready")["reason"] == "ImageError"
        available = condition_of(resource, "Available")
        assert available["status"] == "True"
        assert "1 of them an older revision" in available["message"]

        # A later edit repairs it: the broken pod does not block its own replacement.
        await server.merge({"spec": {"runtime": {"image": "plimsoll/engine:fixed"}}})
        await server.wait_for("Ready", within=60)
        assert set((await pod_images(server)).values()) == {"plimsoll/engine:fixed"}


async def test_broken_old_pods_never_block_a_new_template(
    server: ApiServer, kubelet: FakeKubelet
) -> None:
    kubelet.set(cannot_pull, BAD_IMAGE)
    kubelet.set(starting, "plimsoll/engine:slow")
    async with server.operator():
        await server.create_deployment(replicas=2, runtime={"image": BAD_IMAGE})
        await server.wait_for("Ready", "False", reason="ImageError", within=60)

        # The new pods need their time; both broken ones are replaced without waiting for it.
        await server.merge({"spec": {"runtime": {"image": "plimsoll/engine:slow"}}})

        async def replaced() -> bool:
            return list((await pod_images(server)).values()) == ["plimsoll/engine:slow"] * 2

        await until(replaced, 20)


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
            return sorted((await pod_images(server)).values()) == [IMAGE, "plimsoll/engine:next"]

        await until(halfway, 30)
    finally:
        await first.kill()

    await server.merge({"spec": {"replicas": 3, "engine": {"maxNumSeqs": 64}}})
    kubelet.set(running, "plimsoll/engine:next")
    async with server.operator():
        await server.wait_for("Ready", within=60)
        assert list((await pod_images(server)).values()) == ["plimsoll/engine:next"] * 3
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


MISSING_MODEL = (
    '{"class": "ModelTooLarge", "phase": "load", "message": "the weights need 9.1 GiB, the limit is '
    '2 GiB", "figures": {}, "suggestion": {"flag": "memory", "value": 10000000000}}'
)


async def test_a_first_template_that_cannot_work_is_stopped_with_its_reason(
    server: ApiServer, kubelet: FakeKubelet
) -> None:
    kubelet.set(crashed(1, MISSING_MODEL))
    async with server.operator():
        await server.create_deployment(replicas=2)
        stalled = await server.wait_for("Stalled", within=60)
        assert stalled["reason"] == "ModelTooLarge"
        assert "9.1 GiB" in stalled["message"]
        assert "10000000000" in stalled["message"] or "9.3" in stalled["message"]

        async def stopped() -> bool:
            found = await server.statefulset()
            return found is not None and found["spec"]["replicas"] == 0

        await until(stopped, 20)

        async def gone() -> bool:
            return await server.pods() == []

        await until(gone, 20)
        await asyncio.sleep(5)
        assert await stopped(), "it stays stopped"
        resource = await server.deployment()
        assert condition_of(resource, "Stalled")["message"] == stalled["message"]
        assert condition_of(resource, "Ready")["status"] == "False"
        assert resource["spec"]["replicas"] == 2
        assert resource["status"]["failures"]["last"]["class"] == "ModelTooLarge"

    # Neither does another operator start it again ...
    async with server.operator():
        await asyncio.sleep(6)
        assert await stopped()
        # ... but a changed spec does.
        kubelet.set(running)
        await server.merge({"spec": {"resources": {"limits": {"memory": "12Gi"}}}})
        await server.wait_for("Ready", within=60)
        await server.wait_for("Stalled", "False")


async def revisions(server: ApiServer) -> dict[str, str]:
    """Which template every pod has that is not going away."""
    return {
        pod["metadata"]["name"]: pod["metadata"]["labels"]["controller-revision-hash"]
        for pod in await server.pods()
        if "deletionTimestamp" not in pod["metadata"]
    }


async def test_a_later_template_that_cannot_work_is_rolled_back(
    server: ApiServer, kubelet: FakeKubelet
) -> None:
    kubelet.set(crashed(1, MISSING_MODEL), "plimsoll/engine:bad")
    async with server.operator():
        await server.create_deployment(replicas=2)
        await server.wait_for("Ready", within=60)
        uids = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await server.pods()}
        old = await revisions(server)

        await server.merge({"spec": {"runtime": {"image": "plimsoll/engine:bad"}}})
        stalled = await server.wait_for("Stalled", reason="ModelTooLarge", within=60)

        async def back() -> bool:
            return await revisions(server) == old

        await until(back, 20)
        await asyncio.sleep(5)
        assert await back()
        kept = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await server.pods()}
        assert kept["assistant-0"] == uids["assistant-0"], "the other replica served throughout"
        resource = await server.deployment()
        assert "2 of 2 replicas serve" in condition_of(resource, "Available")["message"]
        assert f"rolled back to {old['assistant-0']}" in stalled["message"]
        status = resource["status"]
        assert status["rollout"]["step"] == "RolledBack"
        assert status["revision"]["lastKnownGood"] == old["assistant-0"]
        assert status["revision"]["blocked"] == [status["revision"]["updated"]]
        events = [event["reason"] for event in await server.events()]
        assert (events.count("RolledBack"), events.count("ModelTooLarge")) == (1, 1)

        # Whatever else is edited, pods have the template that works; another template is tried.
        edits: list[tuple[Json, int]] = [
            ({"tuning": {"mode": "Hold"}}, 2),
            ({"replicas": 3}, 3),
            ({"replicas": 1, "tuning": {"mode": "Auto"}}, 1),
        ]
        for edit, count in edits:
            await server.merge({"spec": edit})

            async def followed(count: int = count) -> bool:
                return sorted((await pod_images(server)).values()) == [IMAGE] * count

            await until(followed, 20)
            await asyncio.sleep(2)
            assert await followed()
            assert (await server.pods())[0]["metadata"]["uid"] == uids["assistant-0"]
            assert (await server.wait_for("Stalled"))["message"] == stalled["message"]
        await server.merge({"spec": {"runtime": {"image": "plimsoll/engine:good"}}})
        await server.wait_for("Ready", within=60)
        assert list((await pod_images(server)).values()) == ["plimsoll/engine:good"]
        await server.wait_for("Stalled", "False")


async def test_a_canary_answers_and_soaks_before_the_others_follow(
    server: ApiServer, kubelet: FakeKubelet
) -> None:
    engines = ScriptedEngines()
    async with operator_in_process(server, engines):
        await server.create_deployment(
            replicas=3, engine={"maxModelLen": 2048}, rollout={"soak": "3s"}
        )
        await server.wait_for("Ready", within=60)
        engines.probe_outcome = ProbeOutcome.BUSY

        await server.merge({"spec": {"runtime": {"image": "plimsoll/engine:next"}}})
        message = "gets a prompt of 2044 tokens again, after: a scripted answer"

        async def asked() -> bool:
            return message in condition_of(await server.deployment(), "Progressing")["message"]

        await until(asked, 30)
        await asyncio.sleep(5)
        canary = {"assistant-0": IMAGE, "assistant-1": IMAGE, "assistant-2": "plimsoll/engine:next"}
        assert await pod_images(server) == canary
        uids = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await server.pods()}
        assert {uid for uid, _ in engines.probed} == {uids["assistant-2"]}

        engines.probe_outcome = ProbeOutcome.PASSED
        await server.wait_for("Ready", within=60)
        status = (await server.deployment())["status"]
        rollout, revision = status["rollout"], status["revision"]
        assert rollout["canary"] == {
            "pod": "assistant-2",
            "probe": "Passed",
            "promptTokens": 2044,
            "message": "a scripted answer",
            "time": rollout["canary"]["time"],
        }
        assert rollout["proven"] == revision["lastKnownGood"] == revision["updated"]
        events = [event["reason"] for event in await server.events()]
        assert (events.count("CanaryStarted"), events.count("CanaryProven")) == (1, 1)

        # An answer that fails twice takes the template back, though its pod looks healthy.
        engines.probe_outcome = ProbeOutcome.FAILED
        good = await revisions(server)
        await server.merge({"spec": {"runtime": {"image": "plimsoll/engine:worse"}}})
        await server.wait_for("Stalled", reason="CanaryProbeFailed", within=60)

        async def back() -> bool:
            return await revisions(server) == good

        await until(back, 20)
        await asyncio.sleep(3)
        assert await back()
        assert condition_of(await server.deployment(), "Stalled")["status"] == "True"


NO_FOLDER = (
    '{"class": "ModelLoadFailed", "phase": "load", "message": "no folder /models/later", '
    '"figures": {}, "suggestion": null}'
)


async def test_a_cause_outside_the_spec_is_cured_without_an_edit(
    server: ApiServer, kubelet: FakeKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE_SECONDS", 8.0)
    bad = "plimsoll/engine:bad"
    kubelet.set(crashed(1, NO_FOLDER), bad)
    async with operator_in_process(server, ScriptedEngines()):
        await server.create_deployment(replicas=2, runtime={"image": bad})
        for restarts in range(2, 12):
            await asyncio.sleep(1.5)
            if condition_of(await server.deployment(), "Stalled").get("status") == "True":
                break
            kubelet.set(crashed(1, NO_FOLDER, restarts=restarts), bad)
        stalled = await server.wait_for("Stalled")
        assert stalled["reason"] == "ModelLoadFailed"
        assert "tried again at" in stalled["message"]

        async def cut() -> bool:
            return await server.pods() == []

        async def tried() -> bool:
            return len(await server.pods()) == 1

        await until(cut, 7)
        await until(tried, 20)
        await until(cut, 20)
        assert condition_of(await server.deployment(), "Stalled")["status"] == "True"

        kubelet.set(running, bad)
        await server.wait_for("Stalled", "False", within=60)
        await server.wait_for("Ready", within=60)
        assert list((await pod_images(server)).values()) == [bad] * 2
        status = (await server.deployment())["status"]
        assert status["revision"]["lastKnownGood"] == status["revision"]["updated"]
        assert status["revision"].get("blocked", []) == []


async def test_pods_that_the_controller_cannot_make_are_told_of(
    server: ApiServer, kubelet: FakeKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "MISSING_SECONDS", 4.0)
    async with operator_in_process(server, ScriptedEngines()):
        await server.create_deployment(podTemplate={"priorityClassName": "nowhere"})
        degraded = await server.wait_for("Degraded", reason="PodsNotCreated", within=60)
        assert "0 of 1 pods" in degraded["message"]
        assert f"kubectl describe sts assistant -n {server.namespace}" in degraded["message"]
        assert condition_of(await server.deployment(), "Ready")["reason"] == "PodsNotCreated"
        await asyncio.sleep(2)
        settled = await server.versions()
    async with operator_in_process(server, ScriptedEngines()):
        await asyncio.sleep(6)
        assert (await server.versions())["LLMDeployment assistant"] == settled[
            "LLMDeployment assistant"
        ]
        await server.merge({"spec": {"podTemplate": None}})
        await server.wait_for("Ready", within=60)
        await server.wait_for("Degraded", "False")


async def test_a_sigkill_is_told_from_an_out_of_memory_kill(
    server: ApiServer, kubelet: FakeKubelet
) -> None:
    async with server.operator():
        await server.create_deployment(resources={"limits": {"memory": "8Gi"}})
        await server.wait_for("Ready", within=60)

        kubelet.set(recovered(137))
        await wait_for_failure(server, "EngineDead")
        resource = await server.deployment()
        last = resource["status"]["failures"]["last"]
        assert last["exitCode"] == 137
        assert last["pod"] == "assistant-0"
        assert resource["status"].get("oom", {}).get("total", 0) == 0
        await server.wait_for("Ready")

        kubelet.set(crashed(137, reason="OOMKilled", restarts=2))
        await wait_for_failure(server, "CgroupOOM")
        degraded = await server.wait_for("Degraded")
        assert degraded["reason"] == "CgroupOOM"
        assert "8Gi" in degraded["message"]
        assert (await server.deployment())["status"]["oom"]["total"] == 1


async def wait_for_failure(server: ApiServer, failure_class: str) -> None:
    async def seen() -> bool:
        status = (await server.deployment()).get("status", {})
        found: bool = status.get("failures", {}).get("last", {}).get("class") == failure_class
        return found

    await until(seen, 30)


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
