"""``python -m support.chaos --minutes N --seed S``: faults at random points, and what must hold after each.

On a local cluster of its own: one deployment of a tiny model with two replicas, the real operator, engines,
node agent and control plane. A fault is injected at a random moment, sometimes in the middle of a rollout;
then everything must converge: Ready, two pods, both answering, one of each child, one operator at work, and
no pod replaced that the fault or an edit does not explain. Prints every fault with its time; exits 1 with a list of
what did not hold. The same seed makes the same faults in the same order.

Not injected: etcd's compaction and a watch that falls silent while its connection stays (the API server's pause
is as close as this comes).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from plimsoll_local import models
from plimsoll_local.binaries import ensure_binaries
from plimsoll_local.cluster import Cluster, ClusterError
from support.local_cluster import LocalCluster
from support.serving import Serving, install_operator
from support.tiny_model import write_tiny_model

Json = dict[str, Any]

NAME, NAMESPACE, REPLICAS = "chaos", "chaos", 2
# A start of an engine takes about 15 s on a busy machine, a rollout two of them, a paused server 15 s.
CONVERGES_SECONDS = 240.0
# One of each.
CHILDREN = (
    ("apps/v1", "statefulsets", 1),
    ("v1", "services", 2),
    ("v1", "configmaps", 1),
    ("v1", "secrets", 1),
    ("policy/v1", "poddisruptionbudgets", 1),
)


class Chaos:
    """``violations`` is what did not hold, with the fault before it."""

    def __init__(self, serving: Serving, seed: int) -> None:
        self._serving, self._random = serving, random.Random(seed)
        self._edits = 0
        self._began = time.monotonic()
        self.violations: list[str] = []
        self.injected: dict[str, int] = {}
        # Each with whether it explains that pods are replaced.
        self._faults: tuple[tuple[Callable[[], None], bool], ...] = (
            (self.kill_operator, False),
            (self.kill_engine, False),
            (self.kill_node_agent, False),
            (self.pause_api_server, False),
            (self.conflict_every_write, False),
            (self.spoil_children, False),
            (self.edit_the_template, True),
            (self.kill_operator_in_a_rollout, True),
            (self.pause_api_server_in_a_rollout, True),
        )

    def log(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:7.1f} s  {text}", flush=True)

    def run(self, seconds: float) -> None:
        serving = self._serving
        serving.apply(serving.build(NAME, replicas=REPLICAS))
        self.converge("created")
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            fault, explains = self._random.choice(self._faults)
            name = fault.__name__
            before = self.uids()
            self.injected[name] = self.injected.get(name, 0) + 1
            self.log(name)
            try:
                fault()
                self.converge(name)
                after = self.uids()
            except (ClusterError, psutil.Error, AssertionError, OSError) as error:
                self.violate(name, f"{type(error).__name__}: {error}")
                continue
            if not explains and after != before:
                self.violate(name, f"pods were replaced without a cause: {before} -> {after}")
            if explains and set(after.values()) & set(before.values()):
                self.violate(name, "pods of the template before are left")
            time.sleep(self._random.uniform(0, 3))

    def violate(self, fault: str, what: str) -> None:
        self.violations.append(f"after {fault}: {what}")
        self.log(f"VIOLATED: {what}")

    def uids(self) -> dict[str, str]:
        pods = self._serving.pods(NAME)
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}

    def converge(self, fault: str) -> None:
        deadline = time.monotonic() + CONVERGES_SECONDS
        while (missing := self.missing()) is not None:
            if time.monotonic() > deadline:
                self.violate(fault, f"not converged in {CONVERGES_SECONDS:g} s: {missing}")
                return
            time.sleep(1)
        self.log("converged")

    def missing(self) -> str | None:
        """What does not hold now; None when everything does."""
        try:
            found = self._serving.condition(NAME, "Ready")
            if found.get("status") != "True":
                return f"Ready is {found.get('status')}: {found.get('message')}"
            pods = self._serving.pods(NAME)
            ready = [
                pod
                for pod in pods
                for condition in pod["status"].get("conditions", ())
                if condition["type"] == "Ready" and condition["status"] == "True"
            ]
            if (len(pods), len(ready)) != (REPLICAS, REPLICAS):
                return f"{len(ready)} of {len(pods)} pods are ready"
            for version, plural, count in CHILDREN:
                group = f"/api/{version}" if "/" not in version else f"/apis/{version}"
                label = f"labelSelector=plimsoll.dev%2Fdeployment%3D{NAME}"
                listed = self._serving.cluster.get(
                    f"{group}/namespaces/{NAMESPACE}/{plural}?{label}"
                )
                if len((listed or {"items": []})["items"]) != count:
                    return f"not {count} {plural}"
            answer = self._serving.chat(NAME)
            return None if answer.status == 200 else f"a request got {answer.status}: {answer.body}"
        except (ClusterError, OSError) as error:
            return f"{type(error).__name__}: {error}"

    def kill_operator(self) -> None:
        self._serving.kill_operator()

    def kill_engine(self) -> None:
        self._serving.kill_engine(f"{NAME}-{self._random.randrange(REPLICAS)}")

    def kill_node_agent(self) -> None:
        for process in self._processes("plimsoll_local.agent"):
            process.kill()

    def pause_api_server(self) -> None:
        seconds = self._random.uniform(2, 15)
        servers = self._processes("kube-apiserver")
        for process in servers:
            process.suspend()
        try:
            time.sleep(seconds)
        finally:
            for process in servers:
                process.resume()

    def conflict_every_write(self) -> None:
        """Another writer touches what the operator writes, as fast as it can, for ten seconds, while the
        operator has something to write."""
        stop = threading.Event()

        def write() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                for kind in ("llmd", "sts", "cm"):
                    name = f"{NAME}-limits" if kind == "cm" else NAME
                    patch = {"metadata": {"annotations": {"test/other": str(number)}}}
                    self._serving.kubectl(
                        "patch", kind, name, "--type=merge", f"-p={json.dumps(patch)}"
                    )

        writer = threading.Thread(target=write)
        writer.start()
        try:
            self.patch({"tuning": {"mode": self._random.choice(["Auto", "Hold"])}})
            time.sleep(10)
        finally:
            stop.set()
            writer.join()

    def spoil_children(self) -> None:
        """A passer-by changes what is the operator's."""
        patch = {"spec": {"selector": {"app.kubernetes.io/instance": "nobody"}}}
        self._serving.kubectl("patch", "svc", NAME, "--type=merge", f"-p={json.dumps(patch)}")
        self._serving.kubectl("delete", "cm", f"{NAME}-limits")

    def edit_the_template(self) -> None:
        self._edits += 1
        self.patch({"podTemplate": {"annotations": {"test/edit": str(self._edits)}}})

    def kill_operator_in_a_rollout(self) -> None:
        self.edit_the_template()
        time.sleep(self._random.uniform(0, 15))
        self.kill_operator()

    def pause_api_server_in_a_rollout(self) -> None:
        self.edit_the_template()
        time.sleep(self._random.uniform(0, 15))
        self.pause_api_server()

    def patch(self, spec: Json) -> None:
        body = json.dumps({"spec": spec})
        self._serving.kubectl("patch", "llmd", NAME, "--type=merge", f"-p={body}")

    def _processes(self, what: str) -> list[psutil.Process]:
        supervisor = psutil.Process(self._serving.cluster.cluster.processes()[0])
        found = [
            process
            for process in supervisor.children(recursive=True)
            if any(word == what or word.endswith(f"/{what}") for word in process.cmdline()[:3])
        ]
        assert found, f"no process of {what}"
        return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"seed {arguments.seed}", flush=True)
    cluster = Cluster.up(f"chaos-{os.getpid()}", tied=True)
    try:
        with tempfile.TemporaryDirectory() as name:
            home = Path(name)
            home.chmod(0o755)
            write_tiny_model(home / "tiny")
            local = LocalCluster(cluster, ensure_binaries().kubectl)
            install_operator(local)
            local.kubectl("create", "namespace", NAMESPACE)
            serving = Serving(local, NAMESPACE, models.CLAIM_NAME)
            serving.apply(*models.build_volume(home, NAMESPACE))
            chaos = Chaos(serving, arguments.seed)
            chaos.run(60 * arguments.minutes)
            count = sum(chaos.injected.values())
            print(f"{count} faults with seed {arguments.seed}: {chaos.injected}")
    finally:
        cluster.down()
    for violation in chaos.violations:
        print(f"VIOLATED {violation}", file=sys.stderr)
    return 1 if chaos.violations else 0


if __name__ == "__main__":
    sys.exit(main())
