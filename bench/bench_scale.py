"""The operator over 10, 100 and 1,000 LLMDeployments: how long one look at all of them takes.

The API server and etcd are real; the engines are made up and answer at once, and this file plays the
StatefulSet controller (one ready pod for each deployment), so that nothing but the operator is measured. It is a
process of its own (this file with ``--operator``), with a scrape interval of 1 s: where a round takes longer, the
next follows at once. Prints for each size: a full round (every deployment read once), what the operator asks of
the API server in it, what it writes when nothing happens (must be nothing), its memory, and the processor time of
both. Exits 1 above the goals: 30 s a round at 1,000, no write.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import kopf
import psutil
import yaml
from kubernetes.aio import client, config

from plimsoll_local.binaries import ensure_binaries
from plimsoll_local.controlplane import ControlPlane
from plimsoll_operator import cluster as api
from plimsoll_operator import handlers  # noqa: F401  (kopf finds them)
from plimsoll_operator.cluster import Cluster
from plimsoll_operator.controller import Controller, Options
from plimsoll_operator.desired.status import METRICS_INTERVAL_SECONDS
from plimsoll_operator.observed import Credentials, Pod
from plimsoll_operator.plan.canary import Probe
from plimsoll_operator.spec import Deployment
from plimsoll_operator.telemetry import Telemetry
from plimsoll_operator.tuning.values import (
    EngineReading,
    Limits,
    LimitsOutcome,
    OutcomeKind,
    Unknown,
)

Json = dict[str, Any]

GOAL_ROUND_SECONDS = 30.0
NAMESPACE = "bench"
CRDS = Path(__file__).parents[1] / "crds"
_WRITES = ("POST", "PUT", "PATCH", "DELETE")


class Engines:
    """Report the same for ever, take every limit, and count who was read."""

    def __init__(self) -> None:
        self.revisions: dict[str, int] = {}
        self.read_at: dict[str, float] = {}

    async def read(
        self, deployment: Deployment, pods: Iterable[Pod]
    ) -> dict[str, EngineReading | Unknown]:
        now = time.time()
        self.read_at[deployment.name] = now
        return {
            pod.name: EngineReading(
                pod=pod.name,
                at=now,
                kv_cache_usage=0.1,
                waiting=0,
                running=0,
                preemptions_total=0.0,
                started_at=1.0,
                block_size=16,
                max_model_len_admitted=2048,
                max_model_len_ceiling=2048,
                limits_revision=self.revisions.get(pod.name, 0),
            )
            for pod in pods
        }

    async def set_limits(
        self, pods: Iterable[Pod], credentials: Credentials, revision: int, limits: Limits
    ) -> dict[str, LimitsOutcome]:
        found = {}
        for pod in pods:
            self.revisions[pod.name] = revision
            found[pod.name] = LimitsOutcome(
                OutcomeKind.APPLIED, pod.name, revision, effective=limits
            )
        return found

    def probe(
        self, deployment: Deployment, pod: Pod, *, tokens: int, api_key: str | None
    ) -> Probe | None:
        return None


async def run_operator() -> None:
    """Each line of stdin asks for a line with what has been done so far."""
    engines, telemetry, stop = Engines(), Telemetry(), asyncio.Event()
    operator = asyncio.create_task(
        kopf.operator(
            memo=Controller(Options(), engines, telemetry),
            standalone=True,
            namespaces=[NAMESPACE],
            stop_flag=stop,
        )
    )
    loop = asyncio.get_running_loop()
    me = psutil.Process()
    while await loop.run_in_executor(None, sys.stdin.readline):
        requests = {
            "/".join(sample.labels.values()): sample.value
            # Not the whole page: rendering it for 1,000 would be most of what is measured.
            for metric in telemetry.requests.collect()
            for sample in metric.samples
            if sample.name == "plimsoll_operator_api_requests_total"
        }
        found = {
            "requests": requests,
            "read": engines.read_at,
            "rss": me.memory_info().rss,
            "cpu": sum(me.cpu_times()[:2]),
        }
        print(json.dumps(found), flush=True)
    stop.set()
    await operator


class Operator:
    """The process, as the measuring side sees it."""

    def __init__(self, kubeconfig: Path, log: Path) -> None:
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--operator"],
                env={**os.environ, "KUBECONFIG": str(kubeconfig)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def ask(self) -> Json:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found: Json = json.loads(self.process.stdout.readline())
        return found

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def deployment(name: str) -> Json:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "model": {"uri": "hf://org/tiny"},
            "accelerator": {"resourceName": ""},
            "engine": {"maxModelLen": 2048},
            "monitoring": {"scrapeInterval": "1s"},
        },
    }


class Hands:
    """What a user, the StatefulSet controller and a kubelet would do."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._at_once = asyncio.Semaphore(16)

    async def request(self, method: str, path: str, body: Json, kind: str = "json") -> Json:
        async with self._at_once:
            return await self._cluster._request(
                method, path, body=body, content_type=f"application/{kind}"
            )

    async def prepare(self) -> None:
        crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        for path in sorted(CRDS.glob("*.yaml")):
            await self.request("POST", crds, yaml.safe_load(path.read_text()))
        await self.request("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        accounts = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
        await self.request("POST", accounts, {"metadata": {"name": "default"}})
        for _ in range(100):
            try:
                await self._cluster.find(api.LLM_DEPLOYMENT, NAMESPACE, "")
            except api.ApiError:
                await asyncio.sleep(0.2)
            else:
                return
        raise TimeoutError("the definitions are not served")

    async def create(self, name: str) -> None:
        await self.request("POST", api.LLM_DEPLOYMENT.path(NAMESPACE), deployment(name))

    async def start_pod(self, statefulset: Json) -> None:
        metadata, template = statefulset["metadata"], statefulset["spec"]["template"]
        name, revision = f"{metadata['name']}-0", f"{metadata['name']}-1"
        owner = {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "name": metadata["name"],
            "uid": metadata["uid"],
            "controller": True,
        }
        labels = {**template["metadata"]["labels"], "controller-revision-hash": revision}
        pod = {
            "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
            "spec": template["spec"],
        }
        await self.request("POST", api.POD.path(NAMESPACE), pod)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        container = {
            "name": "engine",
            "image": "plimsoll/engine",
            "imageID": "",
            "ready": True,
            "started": True,
            "restartCount": 0,
            "state": {"running": {"startedAt": now}},
        }
        status: Json = {
            "phase": "Running",
            "podIP": "192.0.2.1",
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": now}],
            "containerStatuses": [container],
        }
        path = api.POD.path(NAMESPACE, name, "status")
        await self.request("PATCH", path, {"status": status}, "merge-patch+json")
        status = {
            "observedGeneration": metadata["generation"],
            "replicas": 1,
            "currentRevision": revision,
            "updateRevision": revision,
        }
        path = api.STATEFUL_SET.path(NAMESPACE, metadata["name"], "status")
        await self.request("PATCH", path, {"status": status}, "merge-patch+json")

    async def grow(self, before: int, after: int) -> None:
        """Until every deployment up to ``after`` is Ready."""
        await asyncio.gather(*(self.create(f"d{n:04}") for n in range(before, after)))
        started: set[str] = set()
        deadline = time.monotonic() + 900
        while time.monotonic() < deadline:
            for each in await self._cluster.find(api.STATEFUL_SET, NAMESPACE, ""):
                name, number = each["metadata"]["name"], int(each["metadata"]["name"][1:])
                if number >= before and name not in started:
                    started.add(name)
                    await self.start_pod(each)
            listed = await self._cluster.find(api.LLM_DEPLOYMENT, NAMESPACE, "")
            if sum(is_ready(each) for each in listed) == after:
                return
            await asyncio.sleep(1)
        raise TimeoutError(f"not all of {after} deployments became Ready")


def is_ready(resource: Json) -> bool:
    conditions = resource.get("status", {}).get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


async def measure_round(operator: Operator, count: int) -> tuple[float, float, Json, Json]:
    """Seconds until each has been read once more, and the operator's processor time of them."""
    began, before = time.time(), operator.ask()
    while True:
        await asyncio.sleep(0.05 if count < 200 else 0.5)
        after = operator.ask()
        if len(after["read"]) == count and min(after["read"].values()) >= began:
            return time.time() - began, after["cpu"] - before["cpu"], before, after


def writes(before: Json, after: Json) -> dict[str, float]:
    """By verb and status."""
    delta = {
        key: value - before["requests"].get(key, 0.0) for key, value in after["requests"].items()
    }
    return {key: value for key, value in delta.items() if key.split("/")[0] in _WRITES and value}


async def measure(sizes: list[int], folder: Path, plane: ControlPlane) -> bool:
    configuration = client.Configuration()
    await config.load_kube_config(
        config_file=str(plane.kubeconfig), client_configuration=configuration
    )
    cluster = Cluster(client.ApiClient(configuration))
    hands, held, done = Hands(cluster), True, 0
    await hands.prepare()
    operator = Operator(plane.kubeconfig, folder / "operator.log")
    try:
        for size in sizes:
            began = time.monotonic()
            await hands.grow(done, size)
            done, grown = size, time.monotonic() - began
            # What only follows the traffic may be written as late as this after the last transition.
            await asyncio.sleep(METRICS_INTERVAL_SECONDS)
            await measure_round(operator, size)
            rounds = [await measure_round(operator, size) for _ in range(3)]
            # Longer than a status may be held back: what would be written comes to light.
            while sum(each[0] for each in rounds) < METRICS_INTERVAL_SECONDS:
                rounds.append(await measure_round(operator, size))
            took = [each[0] for each in rounds]
            first, last = rounds[0][2], rounds[-1][3]
            idle = writes(first, last)
            asked = sum(last["requests"].values()) - sum(first["requests"].values())
            seconds = sum(took)
            print(
                f"{size:5} deployments: all Ready after {grown:.0f} s; round "
                f"{min(took):.1f} to {max(took):.1f} s, {sum(r[1] for r in rounds) / len(rounds):.1f} s of the "
                f"operator's processor each; {asked / seconds:.0f} requests/s; writes "
                f"{idle or 'none'} in {seconds:.0f} s; memory {first['rss'] / 2**20:.0f} -> {last['rss'] / 2**20:.0f} MiB",
                flush=True,
            )
            held = held and not idle and max(took) < GOAL_ROUND_SECONDS
    finally:
        operator.stop()
        await cluster.close()
    return held


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--operator", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 1000], metavar="N")
    arguments = parser.parse_args()
    if arguments.operator:
        asyncio.run(run_operator())
        return 0
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Two Services for each, one of them with an address: the local cluster's range has 254.
        flags = ("--service-cluster-ip-range=10.0.0.0/16",)
        plane = ControlPlane(folder, ensure_binaries(), frozenset(), api_server_flags=flags)
        with plane:
            held = asyncio.run(measure(sorted(arguments.sizes), folder, plane))
            if not held:
                print((folder / "operator.log").read_text()[-2000:], file=sys.stderr)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
