"""Replicas of several pods: what is built for them, how they are read, and what is made of a lost one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plimsoll_operator import checks, names
from plimsoll_operator.credentials import renew_credentials
from plimsoll_operator.desired import build_children, build_template
from plimsoll_operator.desired.metadata import fingerprint
from plimsoll_operator.groups import read_group, read_groups, read_leader_worker_set
from plimsoll_operator.observe import read_credentials
from plimsoll_operator.observed import Credentials, Pod, StatefulSet, Unusable
from plimsoll_operator.plan import Step, StepReason, is_broken, next_step
from plimsoll_operator.spec import Deployment, InvalidSpec
from plimsoll_operator.tuning.values import FailureClass, Limits
from support.resources import NOW, deployment, llmdeployment, observed, pod_body, time

Json = dict[str, Any]
IMAGE = "plimsoll/engine:0.1.0"
POOL = {"endpointPickerRef": {"name": "epp"}}
TWO_NODES = {"tensor": 4, "nodes": 2}
GPU = {"resourceName": "nvidia.com/gpu"}
VLLM = {"name": "VLLM", "image": "vllm/vllm-openai:v0.12.0"}
SETTLED = Step(replicas=2, partition=0, reason=StepReason.SETTLED)
LOST = '{"class": "CollectiveFailure", "phase": "serving", "message": "rank 2 is gone"}'


def children(step: Step = SETTLED, **spec: Any) -> dict[str, Json | None]:
    parsed = deployment(**{"parallelism": TWO_NODES, "replicas": 2, **spec})
    built = build_children(
        parsed,
        step=step,
        template=build_template(parsed, IMAGE),
        credentials=completed(None, parsed),
        limits=Limits(),
        revision=1,
        operator_namespace="ops",
    )
    return {f"{kind} {name}": body for (kind, name), body in built.items()}


def completed(found: Credentials | None, parsed: Deployment) -> Credentials:
    return renew_credentials(found, parsed, NOW, rotate_after=None)


def child(name: str, **spec: Any) -> Json:
    body = children(**spec)[name]
    assert body is not None
    return body


def group_template(**spec: Any) -> Json:
    template: Json = child("LeaderWorkerSet assistant-group", **spec)["spec"][
        "leaderWorkerTemplate"
    ]
    return template


def engine(template: Json) -> Json:
    spec = template["spec"]
    (found,) = [
        each
        for each in (*spec["containers"], *spec.get("initContainers", ()))
        if each["name"] == names.ENGINE_CONTAINER
    ]
    return dict(found)


class TestWhatIsBuilt:
    def test_one_workload_and_the_other_goes_first(self) -> None:
        assert list(children())[-2:] == ["StatefulSet assistant", "LeaderWorkerSet assistant-group"]
        assert children()["StatefulSet assistant"] is None
        single = children(parallelism={"tensor": 4})
        assert list(single)[-2:] == ["LeaderWorkerSet assistant-group", "StatefulSet assistant"]
        assert single["LeaderWorkerSet assistant-group"] is None

    def test_the_whole_group_restarts_when_one_pod_is_lost(self) -> None:
        body = child("LeaderWorkerSet assistant-group")
        assert body["spec"]["replicas"] == 2
        template = group_template()
        assert (template["size"], template["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")

    @pytest.mark.parametrize("runtime", [{}, VLLM])
    def test_each_pod_has_its_share_of_the_accelerators(self, runtime: Json) -> None:
        template = group_template(accelerator=GPU, runtime=runtime)
        for part in ("leaderTemplate", "workerTemplate"):
            assert engine(template[part])["resources"]["limits"] == {"nvidia.com/gpu": "2"}

    def test_the_pods_have_the_hash_of_their_template(self) -> None:
        parsed = deployment(parallelism=TWO_NODES)
        expected = fingerprint(build_template(parsed, IMAGE))
        body = child("LeaderWorkerSet assistant-group")
        assert body["metadata"]["annotations"][names.TEMPLATE_ANNOTATION] == expected
        for part in ("leaderTemplate", "workerTemplate"):
            annotations = group_template()[part]["metadata"]["annotations"]
            assert annotations[names.TEMPLATE_ANNOTATION] == expected

    def test_clients_reach_leaders_alone(self) -> None:
        template = group_template()
        labels = {
            part: template[part]["metadata"]["labels"]
            for part in ("leaderTemplate", "workerTemplate")
        }
        selector = child("Service assistant")["spec"]["selector"].items()
        assert selector <= labels["leaderTemplate"].items()
        assert not selector <= labels["workerTemplate"].items()
        # A drained node takes one group: every pod of it counts.
        budget = child("PodDisruptionBudget assistant")["spec"]
        assert budget["maxUnavailable"] == 1
        for each in labels.values():
            assert budget["selector"]["matchLabels"].items() <= each.items()

    def test_what_ranks_exchange_is_for_the_group_alone(self) -> None:
        api, members, control = child("NetworkPolicy assistant")["spec"]["ingress"]
        assert api == {"ports": [{"port": 8000, "protocol": "TCP"}]}
        assert members == {"from": [{"podSelector": {"matchLabels": names.selector("assistant")}}]}
        assert control["ports"] == [{"port": 8001, "protocol": "TCP"}]

    def test_plimsoll_has_one_template_and_a_token_for_all(self) -> None:
        template = group_template()
        leader, worker = engine(template["leaderTemplate"]), engine(template["workerTemplate"])
        assert leader == worker
        assert "--tensor-parallel-size=4" in leader["args"]
        assert "--group-port=8002" in leader["args"]
        (token,) = [v for v in leader["env"] if v["name"] == "PLIMSOLL_GROUP_TOKEN"]
        reference = token["valueFrom"]["secretKeyRef"]
        assert reference == {"name": "assistant-control", "key": "group-token"}
        assert reference["key"] in child("Secret assistant-control")["data"]

    def test_vllm_has_a_gate_before_the_leader_and_none_before_the_others(self) -> None:
        parallelism = {"tensor": 4, "pipeline": 2, "nodes": 4}
        template = group_template(runtime=VLLM, parallelism=parallelism)
        leader, worker = template["leaderTemplate"], template["workerTemplate"]
        assert [c["name"] for c in leader["spec"]["containers"]] == ["gate"]
        assert [c["name"] for c in worker["spec"]["containers"]] == ["engine"]
        assert "initContainers" not in worker["spec"]
        expected = {
            "--distributed-executor-backend=mp",
            "--nnodes=4",
            "--pipeline-parallel-size=2",
            "--tensor-parallel-size=4",
            "--master-addr=$(LWS_LEADER_ADDRESS)",
            "--master-port=8003",
        }
        for part in (leader, worker):
            assert expected <= set(engine(part)["args"])
        assert "--node-rank=0" in engine(leader)["args"]
        assert engine(worker)["args"][-1] == "--headless"
        assert "--node-rank=$(LWS_WORKER_INDEX)" in engine(worker)["args"]
        # Nothing answers there.
        assert not {"startupProbe", "livenessProbe", "readinessProbe", "ports"} & set(
            engine(worker)
        )

    @pytest.mark.parametrize("image", ["vllm/vllm-openai:v0.11.2", "vllm/vllm-openai:latest"])
    def test_a_vllm_that_needs_ray_is_refused(self, image: str) -> None:
        with pytest.raises(InvalidSpec, match=r"spec.runtime.version is .*from 0.12.0 on"):
            group_template(runtime={"name": "VLLM", "image": image})

    def test_what_has_one_pod_has_nothing_of_it(self) -> None:
        single = children(parallelism={"tensor": 4, "nodes": 1})
        assert single == {
            **children(parallelism={"tensor": 4}),
            "Secret assistant-control": (single["Secret assistant-control"]),
        }
        assert "group-token" not in str(single)
        assert names.ROLE_LABEL not in str(single)

    @pytest.mark.parametrize(
        ("step", "partition"),
        [
            (Step(replicas=3, partition=2, reason=StepReason.CANARY), 2),
            # LeaderWorkerSet has no OnDelete: it rolls every group.
            (Step(replicas=3, partition=2, reason=StepReason.REPLACE_BROKEN, on_delete=True), 0),
        ],
    )
    def test_the_plan_moves_its_partition(self, step: Step, partition: int) -> None:
        body = children(step)["LeaderWorkerSet assistant-group"]
        assert body is not None
        assert body["spec"]["replicas"] == 3
        rolling = body["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]
        assert rolling == {"partition": partition, "maxUnavailable": 1, "maxSurge": 0}

    def test_the_groups_token_is_made_once(self) -> None:
        first = completed(None, deployment(parallelism=TWO_NODES))
        secret = child("Secret assistant-control")
        kept = read_credentials(secret)
        assert kept is not None
        assert completed(kept, deployment(parallelism=TWO_NODES)) == kept
        assert first.group
        assert kept.group not in (b"", first.group)
        # A deployment that had no groups before.
        del secret["data"]["group-token"]
        old = read_credentials(secret)
        assert old is not None
        new = completed(old, deployment(parallelism=TWO_NODES))
        assert (new.certificate, new.token) == (old.certificate, old.token)
        assert new.group


def member(name: str, template: str = "new", **state: Any) -> Json:
    """A pod of the group 0 as the API server has it."""
    body = pod_body(name, **state)
    worker = name.count("-") > 2
    owner = {
        "kind": "StatefulSet",
        "controller": True,
        "uid": "uid-leaders",
        "name": "assistant-group",
    }
    if worker:
        owner |= {"uid": "uid-workers", "name": name.rpartition("-")[0]}
    body["metadata"] |= {
        "annotations": {names.TEMPLATE_ANNOTATION: template},
        "ownerReferences": [owner],
    }
    body["metadata"]["labels"][names.GROUP_INDEX_LABEL] = "0"
    return body


def group(leader: Json, *workers: Json, size: int = 2) -> Pod:
    return read_group(leader, workers, size)


LEADER, WORKER = "assistant-group-0", "assistant-group-0-1"
KILLED = {"reason": "OOMKilled", "exitCode": 137, "finishedAt": time(NOW - 10)}
BEREFT = {"reason": "Error", "exitCode": 1, "message": LOST, "finishedAt": time(NOW - 8)}


class TestHowTheyAreRead:
    def test_a_group_is_a_replica(self) -> None:
        bodies = [
            member(LEADER, ready_since=NOW - 500),
            member(WORKER, ready_since=NOW - 300),
            # Somebody else's.
            pod_body("other-0"),
        ]
        (found,) = read_groups(bodies, leaders(), 2)
        assert (found.name, found.ordinal, found.ready) == (LEADER, 0, True)
        assert found.ready_since == NOW - 300
        assert [each.name for each in found.members] == [WORKER]
        assert found.revision == "assistant-group-new"
        assert read_groups(bodies, None, 2) == ()

    @pytest.mark.parametrize(
        "workers",
        [
            (),
            (member(WORKER, ready=False),),
            (member(WORKER, deleting=True),),
        ],
        ids=["missing", "not ready", "going"],
    )
    def test_it_is_ready_with_all_of_its_pods(self, workers: tuple[Json, ...]) -> None:
        found = group(member(LEADER), *workers)
        assert (found.ready, found.ready_since) == (False, None)

    def test_a_member_that_finds_no_node_is_the_groups_trouble(self) -> None:
        found = group(member(LEADER, ready=False), member(WORKER, unschedulable="0/3 nodes"))
        assert found.unschedulable == f"pod {WORKER}: 0/3 nodes"
        assert is_broken(found)
        failure = checks.find_failure(found)
        assert failure is not None
        assert failure.failure_class is FailureClass.UNSCHEDULABLE

    @pytest.mark.parametrize(
        ("worker", "failure_class", "says"),
        [
            ({"terminated": KILLED}, FailureClass.CGROUP_OOM, f"pod {WORKER} of its group: killed"),
            (
                {"terminated": {"reason": "Error", "exitCode": 137}},
                FailureClass.ENGINE_DEAD,
                f"pod {WORKER} of its group: the engine was killed by signal 9",
            ),
            ({}, FailureClass.COLLECTIVE_FAILURE, "rank 2 is gone"),
        ],
        ids=["out of memory", "killed", "unknown"],
    )
    def test_the_cause_is_told_before_what_it_did_to_the_others(
        self, worker: Json, failure_class: FailureClass, says: str
    ) -> None:
        found = group(member(LEADER, ready=False, terminated=BEREFT), member(WORKER, **worker))
        failure = checks.find_failure(found)
        assert failure is not None
        assert (failure.failure_class, failure.pod) == (failure_class, LEADER)
        assert failure.message.startswith(says)

    def test_a_death_outlives_the_deletion_that_follows_it(self) -> None:
        def going(asked: float) -> Json:
            body = member(WORKER, deleting=True, ready=False, last_terminated=KILLED, restarts=1)
            body["metadata"] |= {
                "deletionTimestamp": time(asked + 30),
                "deletionGracePeriodSeconds": 30,
            }
            return body

        after = checks.find_failure(group(member(LEADER), going(NOW - 5)))
        assert after is not None
        assert after.failure_class is FailureClass.CGROUP_OOM
        # It was told to stop, and did.
        assert checks.find_failure(group(member(LEADER), going(NOW - 20))) is None


def leaders(partition: int = 0, replicas: int = 2, template: str = "new", seen: int = 1) -> Json:
    return {
        "metadata": {"name": "assistant-group", "uid": "uid-leaders", "generation": 1},
        "spec": {
            "replicas": replicas,
            "updateStrategy": {"rollingUpdate": {"partition": partition}},
            "template": {"metadata": {"annotations": {names.TEMPLATE_ANNOTATION: template}}},
        },
        "status": {"observedGeneration": seen},
    }


def workload(
    *templates: str, recorded: str | None = None, partition: int = 0, seen: Json | None = None
) -> StatefulSet:
    """``templates``: of the groups there are."""
    body = {
        "metadata": {
            "generation": 3,
            "labels": {names.DEPLOYMENT_LABEL: "assistant"},
            "annotations": {names.TEMPLATE_ANNOTATION: "new"},
        },
        "spec": {
            "replicas": 2,
            "rolloutStrategy": {"rollingUpdateConfiguration": {"partition": partition}},
        },
    }
    groups = [
        group(member(f"assistant-group-{index}", template), size=1)
        for index, template in enumerate(templates)
    ]
    return read_leader_worker_set(body, leaders() if seen is None else seen, groups, recorded)


class TestTheWorkload:
    @pytest.mark.parametrize(
        ("templates", "recorded", "current"),
        [
            (("new", "new"), None, "new"),
            (("old", "new"), None, "old"),
            # The other one is being made anew: what was there last is known by status.
            (("new",), "assistant-group-old", "old"),
            (("new",), "assistant-group-new", "new"),
            # Of a StatefulSet that was there before: no group can go back to it.
            ((), "assistant-5d9f6c7b8", "new"),
            ((), None, "new"),
        ],
    )
    def test_its_revisions(
        self, templates: tuple[str, ...], recorded: str | None, current: str
    ) -> None:
        found = workload(*templates, recorded=recorded)
        assert found.update_revision == "assistant-group-new"
        assert found.current_revision == f"assistant-group-{current}"

    @pytest.mark.parametrize(
        ("seen", "followed"),
        [
            (leaders(partition=1), True),
            (leaders(partition=2), True),
            (leaders(partition=0), False),
            (leaders(partition=1, replicas=3), False),
            (leaders(partition=1, template="old"), False),
            (leaders(partition=1, seen=0), False),
        ],
    )
    def test_it_is_seen_when_the_leaders_are_as_it_says(self, seen: Json, followed: bool) -> None:
        found = workload("new", "new", partition=1, seen=seen)
        assert (found.observed_generation == found.generation) is followed

    def test_a_canary_is_one_group(self) -> None:
        resource = llmdeployment(replicas=2, parallelism=TWO_NODES)
        groups = tuple(
            group(member(f"assistant-group-{index}", "old"), size=1) for index in range(2)
        )
        view = observed(resource, pods=groups, statefulset=workload("old", "old"))
        step = next_step(view, given_up=False, applied=False)
        assert (step.reason, step.replicas, step.partition) == (StepReason.CANARY, 2, 1)


@pytest.mark.parametrize(
    ("kind", "why", "says"),
    [
        (
            "LeaderWorkerSet",
            Unusable.NOT_INSTALLED,
            "kubectl apply --server-side -f https://github",
        ),
        ("InferencePool", Unusable.NOT_INSTALLED, "kubectl apply --server-side -f https://github"),
        ("InferencePool", Unusable.FORBIDDEN, "helm upgrade with inferencePool.enabled=true"),
    ],
)
def test_a_cluster_without_a_kind_is_told_how_to_get_it(
    kind: str, why: Unusable, says: str
) -> None:
    found = checks.find_unusable(replace(observed(), unusable={kind: why}), kind)
    assert found is not None
    assert found.reason == f"{kind}{why}"
    assert says in found.message
    assert checks.find_unusable(observed(), kind) is None


class TestThePool:
    def test_a_gateway_routes_to_the_pods_that_serve(self) -> None:
        single = child("InferencePool assistant", parallelism={}, inferencePool=POOL)["spec"]
        assert single["selector"] == {"matchLabels": names.selector("assistant")}
        assert single["targetPorts"] == [{"number": 8000}]
        picker = {"name": "epp", "port": {"number": 9002}, "failureMode": "FailClose"}
        assert single["endpointPickerRef"] == picker
        grouped = child("InferencePool assistant", inferencePool=POOL)["spec"]["selector"]
        assert grouped["matchLabels"][names.ROLE_LABEL] == names.LEADER_ROLE

    def test_there_is_none_unless_it_is_asked_for(self) -> None:
        assert children()["InferencePool assistant"] is None

    def test_without_the_kind_the_engines_serve_and_it_is_degraded(self) -> None:
        view = checks.View(
            observed=replace(observed(), unusable={"InferencePool": Unusable.NOT_INSTALLED}),
            failures=(),
            applied=True,
            stall=None,
            now=NOW,
            lacking=checks.Violation("InferencePoolNotInstalled", "there is none"),
        )
        by_type = {verdict.type: verdict for verdict in checks.judge(view)}
        assert by_type["Degraded"].reason == "InferencePoolNotInstalled"
        assert by_type["Stalled"].status == "False"
        assert by_type["Ready"].reason != "InferencePoolNotInstalled"
