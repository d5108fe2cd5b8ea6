"""The faults of ``support.chaos``: each returns when it has happened and was seen to have happened.

In: a deployment that runs on the local cluster, a source of chance, the proxy between operator and
API server. Out: trouble. Knows nothing of what has to hold afterwards.
"""

from __future__ import annotations

import base64
import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil

from plimsoll_local import relay
from plimsoll_local.cluster import ClusterError
from plimsoll_local.layout import API_PORT, NODE_ADDRESS, RELAY_SOCKET
from support.faulty_proxy import QUIET_SECONDS
from support.local_cluster import LocalCluster
from support.serving import OPERATOR_NAMESPACE, Serving

Json = dict[str, Any]

PROXY_PORT = 7443
# A watch that says nothing for 70 s is begun anew (kopf), and what it missed is read.
SEEN_SECONDS = 100.0
# What is killed is started again by the node agent, with a back-off of up to 30 s.
RESTARTED_SECONDS = 90.0


@contextlib.contextmanager
def proxied(cluster: LocalCluster) -> Iterator[subprocess.Popen[bytes]]:
    """The proxy in the cluster's network, with the operator behind it. Ends with the caller."""
    listen, target = f"{NODE_ADDRESS}:{PROXY_PORT}", f"{NODE_ADDRESS}:{API_PORT}"
    (server,) = find_processes(cluster, "kube-apiserver")
    proxy = subprocess.Popen(
        [
            *("nsenter", "--user", "--preserve-credentials", "--net", f"--target={server.pid}"),
            *(sys.executable, "-m", "support.faulty_proxy"),
            *("--listen", listen, "--target", target),
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert proxy.stdout is not None
        assert proxy.stdout.readline() == b"listening\n"
        cluster.kubectl(
            *("-n", OPERATOR_NAMESPACE, "set", "env", "deployment/plimsoll"),
            f"KUBERNETES_SERVICE_HOST={NODE_ADDRESS}",
            f"KUBERNETES_SERVICE_PORT={PROXY_PORT}",
        )
        rolled = ("rollout", "status", "deployment/plimsoll", "--timeout=120s")
        cluster.kubectl("-n", OPERATOR_NAMESPACE, *rolled, seconds=130)
        yield proxy
    finally:
        proxy.kill()
        proxy.wait()


def find_processes(cluster: LocalCluster, what: str) -> list[psutil.Process]:
    """Of one program or Python module of the cluster."""
    supervisor = psutil.Process(cluster.cluster.processes()[0])
    found = []
    for process in supervisor.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(word == what or word.endswith(f"/{what}") for word in process.cmdline()[:3]):
                found.append(process)
    return found


@dataclass
class Faults:
    serving: Serving
    name: str
    replicas: int
    proxy: subprocess.Popen[bytes]
    random: random.Random
    _edits: int = field(default=0, init=False)
    _others: int = field(default=0, init=False)

    def kinds(self) -> tuple[tuple[Callable[[], None], bool], ...]:
        """Each with whether it explains that pods are replaced."""
        return (
            (self.kill_operator, False),
            (self.kill_engine, False),
            (self.kill_node_agent, False),
            (self.pause_api_server, False),
            (self.hold_up_the_operators_network, False),
            (self.silence_the_watches, False),
            (self.expire_resource_versions, False),
            (self.conflict_every_write, False),
            (self.spoil_children, False),
            (self.edit_the_template, True),
            (self.kill_operator_in_a_rollout, True),
            (self.pause_api_server_in_a_rollout, True),
        )

    def kill_operator(self) -> None:
        """Ready may still be said of one that gave its Lease up and is about to begin anew."""
        self._wait(self._operator_runs, "an operator", RESTARTED_SECONDS)
        before = self._operator_restarts()
        self.serving.kill_operator()
        self._wait(lambda: self._operator_restarts() > before, "a new operator", RESTARTED_SECONDS)

    def _operator_runs(self) -> bool:
        return bool(find_processes(self.serving.cluster, "plimsoll_operator"))

    def kill_engine(self) -> None:
        """Its death is seen before anything is judged: the status before it says Ready."""
        pod = f"{self.name}-{self.random.randrange(self.replicas)}"
        before = self._restarts(pod)
        self.serving.kill_engine(pod)
        self._wait(lambda: self._restarts(pod) > before, f"a new {pod}", RESTARTED_SECONDS)

    def kill_node_agent(self) -> None:
        """The supervisor starts it again."""
        gone = find_processes(self.serving.cluster, "plimsoll_local.agent")
        for process in gone:
            process.kill()
        before = {process.pid for process in gone}

        def is_back() -> bool:
            found = find_processes(self.serving.cluster, "plimsoll_local.agent")
            return bool(found) and not before & {process.pid for process in found}

        self._wait(is_back, "a new node agent", RESTARTED_SECONDS)

    def pause_api_server(self) -> None:
        self._pause(find_processes(self.serving.cluster, "kube-apiserver"))

    def hold_up_the_operators_network(self) -> None:
        """Nothing is lost; past the Lease's deadline the operator has to begin anew."""
        self._pause([psutil.Process(self.proxy.pid)])

    def silence_the_watches(self) -> None:
        """The operator's watches stay open and say nothing any more. What is created then is known by no
        other way."""
        self._silence()
        self._create_another()

    def expire_resource_versions(self) -> None:
        """Where the operator's watches stopped is compacted away in etcd before it can go on there."""
        self._silence()
        self._create_another(meanwhile=self._compact)

    def _silence(self) -> None:
        # Until a watch that has only begun is known for one.
        time.sleep(QUIET_SECONDS + 2)
        self.proxy.send_signal(signal.SIGUSR1)
        assert self.proxy.stdout is not None
        silent = int(self.proxy.stdout.readline())
        print(f"           {silent} connections are silent", flush=True)
        assert silent, "no watch was silenced"

    def conflict_every_write(self) -> None:
        """Another writer touches what the operator writes, as fast as it can, for ten seconds, while the
        operator has something to write."""
        stop = threading.Event()

        def write() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                for kind in ("llmd", "sts", "cm"):
                    name = f"{self.name}-limits" if kind == "cm" else self.name
                    patch = {"metadata": {"annotations": {"test/other": str(number)}}}
                    self.serving.kubectl(
                        "patch", kind, name, "--type=merge", f"-p={json.dumps(patch)}"
                    )

        writer = threading.Thread(target=write)
        writer.start()
        try:
            self._patch({"tuning": {"mode": self.random.choice(["Auto", "Hold"])}})
            time.sleep(10)
        finally:
            stop.set()
            writer.join()

    def spoil_children(self) -> None:
        """A passer-by changes what is the operator's."""
        patch = {"spec": {"selector": {"app.kubernetes.io/instance": "nobody"}}}
        self.serving.kubectl("patch", "svc", self.name, "--type=merge", f"-p={json.dumps(patch)}")
        self.serving.kubectl("delete", "cm", f"{self.name}-limits")

    def edit_the_template(self) -> None:
        self._edits += 1
        self._patch({"podTemplate": {"annotations": {"test/edit": str(self._edits)}}})

    def kill_operator_in_a_rollout(self) -> None:
        self.edit_the_template()
        time.sleep(self.random.uniform(0, 15))
        self.kill_operator()

    def pause_api_server_in_a_rollout(self) -> None:
        self.edit_the_template()
        time.sleep(self.random.uniform(0, 15))
        self.pause_api_server()

    def _pause(self, processes: list[psutil.Process]) -> None:
        seconds = self.random.uniform(2, 15)
        for process in processes:
            process.suspend()
        try:
            time.sleep(seconds)
        finally:
            for process in processes:
                process.resume()

    def _create_another(self, meanwhile: Callable[[], None] | None = None) -> None:
        """A deployment without a pod; returns when the operator has answered to it, and removes it."""
        self._others += 1
        name = f"other-{self._others}"
        self.serving.apply(self.serving.build(name, replicas=0))
        if meanwhile is not None:
            meanwhile()

        def is_seen() -> bool:
            found = self.serving.deployment(name) or {}
            return bool(found.get("status", {}).get("conditions"))

        began = time.monotonic()
        self._wait(is_seen, f"{name} to be seen", SEEN_SECONDS)
        print(f"           {name} was seen after {time.monotonic() - began:.0f} s", flush=True)
        self.serving.delete(name)

    def _compact(self) -> None:
        for kind in ("llmd", "sts"):
            patch = {"metadata": {"annotations": {"test/compacted": str(time.time())}}}
            self.serving.kubectl(
                "patch", kind, self.name, "--type=merge", f"-p={json.dumps(patch)}"
            )
        (etcd,) = find_processes(self.serving.cluster, "etcd")
        flag = "--listen-client-urls=http://"
        (target,) = (word.removeprefix(flag) for word in etcd.cmdline() if word.startswith(flag))
        directory = self.serving.cluster.cluster.directory
        with relay.forward(directory / RELAY_SOCKET, target) as port:
            # Any read tells the present revision.
            key = base64.b64encode(b"/").decode()
            revision = _post(port, "/v3/kv/range", {"key": key})["header"]["revision"]
            _post(port, "/v3/kv/compaction", {"revision": revision, "physical": True})
        self.proxy.send_signal(signal.SIGUSR2)

    def _patch(self, spec: Json) -> None:
        body = json.dumps({"spec": spec})
        self.serving.kubectl("patch", "llmd", self.name, "--type=merge", f"-p={body}")

    def _restarts(self, pod: str) -> int:
        found = {each["metadata"]["name"]: each for each in self.serving.pods(self.name)}
        return sum(_restart_counts(found[pod]))

    def _operator_restarts(self) -> int:
        path = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods"
        found = self.serving.cluster.get(path) or {"items": []}
        return sum(count for pod in found["items"] for count in _restart_counts(pod))

    def _wait(self, holds: Callable[[], bool], what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(ClusterError, OSError):
                if holds():
                    return
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {seconds:g} s for {what}")
            time.sleep(0.5)


def _restart_counts(pod: Json) -> list[int]:
    return [each["restartCount"] for each in pod["status"].get("containerStatuses", ())]


def _post(port: int, path: str, body: Json) -> Json:
    data = json.dumps(body).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data, timeout=10) as response:
        answer: Json = json.load(response)
    return answer
