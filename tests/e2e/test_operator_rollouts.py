"""Templates that cannot work, canaries and deaths, under the real StatefulSet controller."""

import asyncio
from typing import Any

import pytest

from plimsoll_operator import checks
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

        available = condition_of(resource, "Available")
        assert available["status"] == "True"
        assert "of them an older revision" in available["message"]

        # When its time is over, the replica that it has taken comes back as it was.
        stuck = await server.wait_for("Progressing", "False", within=40)
        assert stuck["reason"] == "ImageError"
        assert "assistant-1" in stuck["message"]
        assert BAD_IMAGE in stuck["message"]
        assert "no replica of the template worked within 8 s; rolled back to" in stuck["message"]

        async def back() -> bool:
            images = list((await server.images()).values())
            available = condition_of(await server.deployment(), "Available")["message"]
            return images == [IMAGE] * 2 and "2 of 2 replicas serve" in available

        await until(back, 30)
        resource = await server.deployment()
        assert resource["status"]["rollout"]["step"] == "RolledBack"
        revision = resource["status"]["revision"]
        assert revision["blocked"] == [revision["updated"]]
        ready = condition_of(resource, "Ready")
        assert (ready["status"], ready["reason"]) == ("False", "ImageError")

        # A later edit goes on.
        await server.merge({"spec": {"runtime": {"image": "plimsoll/engine:fixed"}}})
        await server.wait_for("Ready", within=60)
        assert set((await server.images()).values()) == {"plimsoll/engine:fixed"}


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
            return list((await server.images()).values()) == ["plimsoll/engine:slow"] * 2

        await until(replaced, 20)


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


async def test_a_count_of_0_and_up_again_is_a_new_start(
    server: ApiServer, kubelet: FakeKubelet
) -> None:
    bad = "plimsoll/engine:bad"
    kubelet.set(crashed(1, MISSING_MODEL), bad)

    async def stopped() -> bool:
        return await server.pods() == []

    async with server.operator():
        await server.create_deployment(replicas=2)
        await server.wait_for("Ready", within=60)
        await server.merge({"spec": {"runtime": {"image": bad}}})
        await server.wait_for("Stalled", reason="ModelTooLarge", within=60)

        # With the last pod goes what could be rolled back to.
        await server.merge({"spec": {"replicas": 0}})
        await until(stopped, 30)
        await server.wait_for("Stalled", "False")
        assert (await server.deployment())["status"]["revision"].get("blocked", []) == []

        await server.merge({"spec": {"replicas": 1}})
        await server.wait_for("Stalled", reason="ModelTooLarge", within=60)
        await until(stopped, 30)

        # What was wrong is mended outside the spec.
        await server.merge({"spec": {"replicas": 0}})
        await server.wait_for("Stalled", "False")
        kubelet.set(running, bad)
        await server.merge({"spec": {"replicas": 2}})
        await server.wait_for("Ready", within=60)
        assert list((await server.images()).values()) == [bad] * 2


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
                return sorted((await server.images()).values()) == [IMAGE] * count

            await until(followed, 20)
            await asyncio.sleep(2)
            assert await followed()
            assert (await server.pods())[0]["metadata"]["uid"] == uids["assistant-0"]
            assert (await server.wait_for("Stalled"))["message"] == stalled["message"]
        await server.merge({"spec": {"runtime": {"image": "plimsoll/engine:good"}}})
        await server.wait_for("Ready", within=60)
        assert list((await server.images()).values()) == ["plimsoll/engine:good"]
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
        assert await server.images() == canary
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
        assert list((await server.images()).values()) == [bad] * 2
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
