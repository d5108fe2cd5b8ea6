"""``python -m support.chaos --minutes N --seed S``: faults at random points, and what must hold after each.

On a local cluster of its own: one deployment of a tiny model with two replicas, the real operator, engines,
node agent and control plane. Faults (chaos_faults.py) are dealt like cards: a shuffled deck of every kind,
then the next, so that each kind comes up; the first deck is dealt to its end even if that takes longer than N
minutes. After each everything must converge: Ready, two pods, both ready, one of each child, an answer to a
request, and no pod replaced that the fault or an edit does not explain. Prints every fault with its time; exits 1
with a list of what did not hold. The same seed makes the same faults in the same order.

The API server runs without its watch cache: with it, an expired resource version takes more than a minute of writes.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil

from plimsoll_local import models
from plimsoll_local.binaries import ensure_binaries
from plimsoll_local.cluster import Cluster, ClusterError
from support.chaos_faults import Faults, proxied
from support.local_cluster import Json, LocalCluster
from support.serving import OPERATOR_NAMESPACE, Serving, install_operator
from support.tiny_model import write_tiny_model

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

    def __init__(self, serving: Serving, proxy: subprocess.Popen[bytes], seed: int) -> None:
        self._serving, self._random = serving, random.Random(seed)
        self._faults = Faults(serving, NAME, REPLICAS, proxy, self._random)
        self._began = time.monotonic()
        self.violations: list[str] = []
        self.injected: Counter[str] = Counter()

    def log(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:7.1f} s  {text}", flush=True)

    def run(self, seconds: float) -> None:
        self._serving.apply(self._serving.build(NAME, replicas=REPLICAS))
        self.converge("created")
        ends = time.monotonic() + seconds
        dealt = False
        while not dealt or time.monotonic() < ends:
            deck = list(self._faults.kinds())
            self._random.shuffle(deck)
            for fault, explains in deck:
                if dealt and time.monotonic() > ends:
                    break
                self.inject(fault, explains=explains)
                time.sleep(self._random.uniform(0, 3))
            dealt = True

    def inject(self, fault: Callable[[], None], *, explains: bool) -> None:
        name = fault.__name__
        before = self.uids()
        self.injected[name] += 1
        self.log(name)
        try:
            fault()
            self.converge(name)
            after = self.uids()
        except (ClusterError, psutil.Error, subprocess.SubprocessError) as error:
            words = getattr(error, "stderr", None) or error
            self.violate(name, f"{type(error).__name__}: {words}")
        except (AssertionError, OSError) as error:
            self.violate(name, f"{type(error).__name__}: {error}")
        else:
            if not explains and after != before:
                self.violate(name, f"pods were replaced without a cause: {before} -> {after}")
            if explains and set(after.values()) & set(before.values()):
                self.violate(name, "pods of the template before are left")

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
            ready = [pod for pod in pods if _is_ready(pod)]
            if (len(pods), len(ready)) != (REPLICAS, REPLICAS):
                return f"{len(ready)} of {len(pods)} pods are ready"
            path = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods"
            operators = (self._serving.cluster.get(path) or {"items": []})["items"]
            if [_is_ready(pod) for pod in operators] != [True]:
                return "not one operator is at work"
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


def _is_ready(pod: Json) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"seed {arguments.seed}", flush=True)
    flags = ("--watch-cache=false",)
    cluster = Cluster.up(f"chaos-{os.getpid()}", tied=True, api_server_flags=flags)
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
            with proxied(local) as proxy:
                chaos = Chaos(serving, proxy, arguments.seed)
                chaos.run(60 * arguments.minutes)
                count = chaos.injected.total()
                print(f"{count} faults with seed {arguments.seed}: {dict(chaos.injected)}")
                if chaos.violations:
                    log = local.kubectl("-n", "plimsoll-system", "logs", "deploy/plimsoll")
                    print(log[-6000:], file=sys.stderr)
    finally:
        cluster.down()
    for violation in chaos.violations:
        print(f"VIOLATED {violation}", file=sys.stderr)
    return 1 if chaos.violations else 0


if __name__ == "__main__":
    sys.exit(main())
