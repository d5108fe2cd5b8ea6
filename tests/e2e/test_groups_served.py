"""A replica of two pods with real engines, over gloo, on the local cluster.

The StatefulSet controller, the pods and the engines are real; what makes a LeaderWorkerSet's StatefulSets is a
stand-in (support/leader_worker_sets.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from plimsoll_local import models
from support import definitions
from support.leader_worker_sets import LeaderWorkerSets
from support.local_cluster import Json, LocalCluster
from support.serving import Serving, install_operator
from support.tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CRD = "leaderworkersets.leaderworkerset.x-k8s.io"
# The leader's pod has two processes with torch in them, the server and its rank: 1.1 GiB.
MEMORY = "1536Mi"


@pytest.fixture(scope="module")
def serving(
    local_cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    home = tmp_path_factory.mktemp("models")
    home.chmod(0o755)
    write_tiny_model(home / "tiny", num_kv_heads=2)
    # With the right for a kind that is yet to come.
    install_operator(local_cluster, "leaderWorkerSet.enabled=true")
    local_cluster.kubectl("create", "namespace", "groups")
    serving = Serving(local_cluster, "groups", models.CLAIM_NAME)
    serving.apply(*models.build_volume(home, "groups"))
    yield serving
    serving.kubectl("delete", "llmd", "--all")
    local_cluster.kubectl("delete", "crd", CRD, "--ignore-not-found")


def roles(pods: list[Json]) -> dict[str, str]:
    return {
        pod["metadata"]["name"]: pod["metadata"]["labels"]["plimsoll.dev/role"]
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
    }


def uids(pods: list[Json]) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}


def test_a_group_serves_and_is_made_anew_when_a_member_dies(serving: Serving) -> None:
    cluster = serving.cluster
    resources = {
        "requests": {"cpu": "50m", "memory": MEMORY},
        "limits": {"cpu": "1", "memory": MEMORY},
    }
    serving.apply(serving.build("wide", parallelism={"tensor": 2, "nodes": 2}, resources=resources))
    stalled = serving.wait_for("wide", "Stalled")
    assert stalled["reason"] == "LeaderWorkerSetNotInstalled"
    assert "kubectl apply --server-side" in stalled["message"]
    assert serving.pods("wide") == []

    # What the message asks for, but for the controller. The operator goes on by itself.
    definition = json.dumps(definitions.LEADER_WORKER_SET.read())
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=definition)
    with LeaderWorkerSets(cluster.cluster.kubeconfig_path, serving.namespace):
        serving.wait_for("wide", "Ready")
        pods = serving.pods("wide")
        assert roles(pods) == {"wide-group-0": "leader", "wide-group-0-1": "worker"}
        status = (serving.deployment("wide") or {})["status"]
        assert (status["replicas"], status["readySummary"]) == (1, "1/1")
        assert serving.chat("wide").status == 200
        answer = serving.chat("wide", "the same prompt")

        before = uids(pods)
        serving.kill_engine("wide-group-0-1")

        def last() -> Json | None:
            status = (serving.deployment("wide") or {})["status"]
            found: Json | None = status.get("failures", {}).get("last")
            return found

        failure = cluster.wait_for(last, "the death in status", 60)
        assert failure["pod"] == "wide-group-0"
        assert failure["class"] in ("EngineDead", "CollectiveFailure"), failure

        def anew() -> bool:
            now = uids(serving.pods("wide"))
            return now.keys() == before.keys() and not set(now.values()) & set(before.values())

        cluster.wait_for(anew, "both pods to be made anew", 120)
        serving.wait_for("wide", "Ready")
        settled = last()
        assert settled is not None
        # The member was killed; that its leader then lost a rank is what came of it.
        assert settled["class"] == "EngineDead", settled
        assert "wide-group-0-1" in settled["message"], settled
        again = serving.chat("wide", "the same prompt")
        assert again.body["choices"] == answer.body["choices"]

        serving.delete("wide")
        cluster.wait_for(lambda: not serving.pods("wide"), "its pods to end", 120)
        cluster.wait_for(lambda: not serving.children("wide"), "its children to be gone", 60)
