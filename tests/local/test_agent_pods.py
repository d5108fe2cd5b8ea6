"""Pods on a whole local cluster, from their start to their end: what a kubelet does with them, seen through the API
server."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from support.agent_pods import SHELL, pod, python, shell
from support.local_cluster import Json, LocalCluster, LocalNamespace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def test_a_container_over_its_limit_is_killed_and_comes_back(
    local_namespace: LocalNamespace,
) -> None:
    program = python("x = bytearray(b'x') * (300 << 20)", resources={"limits": {"memory": "96Mi"}})
    local_namespace.apply(pod("oom", program))
    status = local_namespace.wait_for_container(
        "oom",
        lambda c: c["restartCount"] >= 2 and "CrashLoopBackOff" in str(c["state"]),
        "to be in CrashLoopBackOff",
    )
    last = status["lastState"]["terminated"]
    assert (last["reason"], last["exitCode"]) == ("OOMKilled", 137)
    assert status["ready"] is False
    found = local_namespace.pod("oom")
    assert found is not None
    assert found["status"]["phase"] == "Running"
    reasons = {event["reason"] for event in local_namespace.events("oom")}
    assert {"Pulled", "Created", "Started", "BackOff"} <= reasons


def test_restarts_wait_longer_each_time(local_namespace: LocalNamespace) -> None:
    local_namespace.apply(pod("crash", shell("exit 7")))
    status = local_namespace.wait_for_container(
        "crash", lambda c: c["restartCount"] >= 3 and "waiting" in c["state"], "4 starts"
    )
    message = status["state"]["waiting"]["message"]
    # The third restart came 2 + 4 s after the first failure; the fourth waits 8 s.
    assert message.startswith("back-off 8s restarting failed container=main pod=crash_")
    assert status["lastState"]["terminated"]["exitCode"] == 7


def test_termination_messages_by_file_and_by_log(local_namespace: LocalNamespace) -> None:
    writes = shell("echo because > /dev/termination-log; exit 3")
    elsewhere = shell("echo there > /run/end; exit 0", terminationMessagePath="/run/end")
    falls_back = shell(
        "for i in $(seq 200); do echo line $i; done; exit 1",
        terminationMessagePolicy="FallbackToLogsOnError",
    )
    local_namespace.apply(
        pod("writes", writes, restartPolicy="Never"),
        pod("elsewhere", elsewhere, restartPolicy="Never"),
        pod("falls-back", falls_back, restartPolicy="Never"),
    )

    def end(name: str) -> Json:
        local_namespace.wait_for_phase(name, "Succeeded", "Failed")
        status = local_namespace.container(name)
        assert status is not None
        found: Json = status["state"]["terminated"]
        return found

    assert end("writes") | {"message": "because\n", "exitCode": 3, "reason": "Error"} == end(
        "writes"
    )
    assert end("elsewhere")["message"] == "there\n"
    assert end("elsewhere")["reason"] == "Completed"
    lines = end("falls-back")["message"].splitlines()
    assert (len(lines), lines[0], lines[-1]) == (80, "line 121", "line 200")


def test_restart_policies_and_phases(local_namespace: LocalNamespace) -> None:
    local_namespace.apply(
        pod("done", shell("exit 0"), restartPolicy="OnFailure"),
        pod("failed", shell("exit 1"), restartPolicy="Never"),
        pod("missing", shell("x", command=["/no/such/program"]), restartPolicy="Never"),
    )
    assert local_namespace.wait_for_phase("done", "Succeeded")["status"]["podIP"]
    local_namespace.wait_for_phase("failed", "Failed")
    local_namespace.wait_for_phase("missing", "Failed")
    status = local_namespace.container("missing")
    assert status is not None
    end = status["state"]["terminated"]
    assert (end["exitCode"], end["reason"]) == (128, "StartError")
    assert "/no/such/program" in end["message"]


def test_an_unknown_image_waits_and_says_which(local_namespace: LocalNamespace) -> None:
    local_namespace.apply(pod("unknown", {"image": "example.com/none:1"}))
    status = local_namespace.wait_for_container(
        "unknown",
        lambda c: c["state"].get("waiting", {}).get("reason") == "ImagePullBackOff",
        "to be in ImagePullBackOff",
    )
    assert "example.com/none:1" in status["state"]["waiting"]["message"]
    messages = [event["message"] for event in local_namespace.events("unknown")]
    assert "Error: ErrImagePull" in messages


def test_init_containers_run_first_and_share_volumes(local_namespace: LocalNamespace) -> None:
    mount = [{"name": "data", "mountPath": "/data"}]
    init = {"name": "init", "image": SHELL, **shell("echo made > /data/x", volumeMounts=mount)}
    local_namespace.apply(
        pod(
            "init",
            shell("cat /data/x", volumeMounts=mount),
            initContainers=[init],
            volumes=[{"name": "data", "emptyDir": {}}],
            restartPolicy="Never",
        )
    )
    local_namespace.wait_for_phase("init", "Succeeded")
    assert local_namespace.kubectl("logs", "init") == "made\n"
    status = local_namespace.container("init", "init")
    assert status is not None
    assert (status["ready"], status["state"]["terminated"]["reason"]) == (True, "Completed")


def test_graceful_termination_runs_the_hook_and_waits(
    local_namespace: LocalNamespace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("hook")
    container = shell(
        "trap 'echo term >> /out/log; exit 0' TERM; echo up; while :; do sleep 0.1; done",
        lifecycle={"preStop": {"exec": {"command": ["sh", "-c", "echo hook >> /out/log"]}}},
        volumeMounts=[{"name": "out", "mountPath": "/out"}],
    )
    volumes = [{"name": "out", "hostPath": {"path": str(directory)}}]
    local_namespace.apply(
        pod("polite", container, volumes=volumes, terminationGracePeriodSeconds=60)
    )
    local_namespace.wait_for_log("polite", "up")
    began = time.monotonic()
    local_namespace.kubectl("delete", "pod", "polite")
    assert (directory / "log").read_text() == "hook\nterm\n"
    assert time.monotonic() - began < 50


def test_what_does_not_end_in_its_grace_period_is_killed(local_namespace: LocalNamespace) -> None:
    local_namespace.apply(
        pod("stubborn", shell("echo up; sleep 600"), terminationGracePeriodSeconds=3)
    )
    local_namespace.wait_for_log("stubborn", "up")
    began = time.monotonic()
    local_namespace.kubectl("delete", "pod", "stubborn")
    assert 3 <= time.monotonic() - began < 25
    assert local_namespace.pod("stubborn") is None


def test_logs_as_kubectl_asks_for_them(local_namespace: LocalNamespace) -> None:
    script = "echo one; echo two; echo three; [ -f /data/x ] || { touch /data/x; exit 1; }; sleep 2; echo last; sleep 600"
    mount = [{"name": "data", "mountPath": "/data"}]
    local_namespace.apply(
        pod("log", shell(script, volumeMounts=mount), volumes=[{"name": "data", "emptyDir": {}}])
    )
    local_namespace.wait_for_container("log", lambda c: c["restartCount"] == 1, "a restart")
    assert local_namespace.kubectl("logs", "log", "--previous").split() == ["one", "two", "three"]
    follower = subprocess.Popen(
        [local_namespace.cluster.kubectl_path, "logs", "-f", "log", "-n", local_namespace.name],
        env={
            **os.environ,
            "KUBECONFIG": str(local_namespace.cluster.cluster.kubeconfig_path),
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    with follower:
        assert follower.stdout is not None
        lines = [follower.stdout.readline().strip() for _ in range(4)]
        follower.terminate()
    assert lines == ["one", "two", "three", "last"]
    assert local_namespace.kubectl("logs", "log", "--tail=1") == "last\n"
    stamped = local_namespace.kubectl("logs", "log", "--timestamps", "--tail=1")
    assert stamped.startswith("20")
    assert stamped.endswith("Z last\n")
    for verb in (("exec", "log", "--", "true"), ("port-forward", "log", "18080:8080")):
        with pytest.raises(subprocess.CalledProcessError) as refused:
            local_namespace.kubectl(*verb)
        assert "not supported by the local node agent" in refused.value.stderr


def test_a_settled_pod_is_not_written_again(local_namespace: LocalNamespace) -> None:
    probe = {"exec": {"command": ["true"]}, "periodSeconds": 1}
    local_namespace.apply(
        pod("calm", shell("sleep 600", readinessProbe=probe, livenessProbe=probe))
    )
    before = local_namespace.wait_for_ready("calm")["metadata"]["resourceVersion"]
    time.sleep(4)
    found = local_namespace.pod("calm")
    assert found is not None
    assert found["metadata"]["resourceVersion"] == before


def test_a_killed_agent_leaves_nothing_and_its_successor_goes_on(
    local_namespace: LocalNamespace,
) -> None:
    marker = "86397"
    local_namespace.apply(pod("held", shell(f"echo up; exec sleep {marker}")))
    local_namespace.wait_for_log("held", "up")

    def find(*words: str) -> list[int]:
        """Processes with these words in this order at the end of the interpreter's arguments."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                arguments = (entry / "cmdline").read_text().split("\0")
            except OSError:
                continue
            if "\0".join(words) in "\0".join(arguments):
                found.append(int(entry.name))
        return found

    kubeconfig = local_namespace.cluster.cluster.directory / "controlplane" / "kubeconfig"
    (agent,) = find("plimsoll_local.agent", "--kubeconfig", str(kubeconfig))
    (held,) = find("sleep", marker)
    os.kill(agent, signal.SIGKILL)
    local_namespace.cluster.wait_for(
        lambda: held not in find("sleep", marker), "its container's end"
    )
    status = local_namespace.wait_for_container(
        "held", lambda c: c["restartCount"] == 1 and c["ready"], "to run again"
    )
    last = status["lastState"]["terminated"]
    assert (last["reason"], last["exitCode"]) == ("Unknown", 255)
    local_namespace.wait_for_log("held", "up")


def test_the_node_is_ready_and_alive(local_cluster: LocalCluster) -> None:
    node = local_cluster.get("/api/v1/nodes/plimsoll-local")
    assert node is not None
    assert {"cpu", "memory", "pods", "ephemeral-storage"} <= node["status"]["allocatable"].keys()
    addresses = {a["type"]: a["address"] for a in node["status"]["addresses"]}
    assert addresses == {"InternalIP": "10.244.0.1", "Hostname": "plimsoll-local"}
    path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/plimsoll-local"
    lease = local_cluster.get(path)
    assert lease is not None
    first = lease["spec"]["renewTime"]

    def renewed() -> bool:
        found = local_cluster.get(path)
        return found is not None and found["spec"]["renewTime"] > first

    local_cluster.wait_for(renewed, "the lease to be renewed")
