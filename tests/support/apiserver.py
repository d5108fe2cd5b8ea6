"""What tests ask of a real API server, and operators to run against it.

In: a connection and a namespace. Out: objects as plain dictionaries; conditions waited for with a
deadline; operator processes that end with the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kopf
from kubernetes.aio.client import ApiClient

from plimsoll_operator import cluster as api
from plimsoll_operator import handlers as _handlers  # noqa: F401 - registers them
from plimsoll_operator.cluster import Cluster, Resource
from plimsoll_operator.controller import Controller, Options
from plimsoll_operator.engines import Engines
from plimsoll_operator.observed import Credentials, Pod
from plimsoll_operator.plan.canary import Probe, ProbeOutcome
from plimsoll_operator.spec import Deployment
from plimsoll_operator.tuning.values import (
    EngineReading,
    Limits,
    LimitsOutcome,
    OutcomeKind,
    Unknown,
)

Json = dict[str, Any]

CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CHILDREN = (
    (api.STATEFUL_SET, ""),
    (api.SERVICE, ""),
    (api.SERVICE, "-pods"),
    (api.SECRET, "-control"),
    (api.CONFIG_MAP, "-limits"),
    (api.NETWORK_POLICY, ""),
)


class ApiServer(Cluster):
    """The operator's own small client, and what only tests do."""

    def __init__(self, api: ApiClient, kubeconfig: Path, namespace: str) -> None:
        super().__init__(api)
        self.api, self.kubeconfig, self.namespace = api, kubeconfig, namespace

    async def create_namespace(self) -> None:
        body: Json = {"metadata": {"name": self.namespace}}
        await self._request("POST", "/api/v1/namespaces", body=body)

    async def install_crd(self, body: Json) -> None:
        """Returns when the API server serves it."""
        await self._request("POST", CRD, body=body)

        async def established() -> bool:
            found = await self._request("GET", f"{CRD}/{body['metadata']['name']}")
            conditions = found.get("status", {}).get("conditions") or []
            return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)

        await until(established, 30)

    async def create_deployment(self, name: str = "assistant", **spec: Any) -> Json:
        """An LLMDeployment on CPU with a tiny model; raises ApiError with the server's words."""
        return await self._request(
            "POST",
            api.LLM_DEPLOYMENT.path(self.namespace),
            query=[("fieldManager", "kubectl")],
            body={
                "apiVersion": "plimsoll.dev/v1alpha1",
                "kind": "LLMDeployment",
                "metadata": {"name": name},
                "spec": {
                    "model": {"uri": "hf://org/tiny"},
                    "accelerator": {"resourceName": ""},
                    "monitoring": {"scrapeInterval": "1s"},
                    "drain": "0s",
                    **spec,
                },
            },
        )

    async def apply_deployment(
        self, spec: Json, *, manager: str, name: str = "assistant", force: bool = False
    ) -> Json:
        """Server-side apply by another manager, as a deployment tool does it."""
        return await self._request(
            "PATCH",
            api.LLM_DEPLOYMENT.path(self.namespace, name),
            query=[("fieldManager", manager), ("force", str(force).lower())],
            body={
                "apiVersion": "plimsoll.dev/v1alpha1",
                "kind": "LLMDeployment",
                "metadata": {"name": name},
                "spec": spec,
            },
            content_type="application/apply-patch+yaml",
        )

    async def merge(
        self, body: Json, name: str = "assistant", resource: Resource = api.LLM_DEPLOYMENT
    ) -> Json:
        return await self._request(
            "PATCH",
            resource.path(self.namespace, name),
            body=body,
            content_type="application/merge-patch+json",
        )

    async def scale(self, replicas: int, name: str = "assistant") -> Json:
        """What `kubectl scale` does."""
        return await self._request(
            "PATCH",
            api.LLM_DEPLOYMENT.path(self.namespace, name, "scale"),
            body={"spec": {"replicas": replicas}},
            content_type="application/merge-patch+json",
        )

    async def deployment(self, name: str = "assistant") -> Json:
        found = await self.get(api.LLM_DEPLOYMENT, self.namespace, name)
        assert found is not None, f"no LLMDeployment {name}"
        return found

    async def statefulset(self, name: str = "assistant") -> Json | None:
        return await self.get(api.STATEFUL_SET, self.namespace, name)

    async def pods(self) -> list[Json]:
        return await self.find(api.POD, self.namespace, "")

    async def images(self) -> dict[str, str]:
        """Of each pod that is not going away."""
        return {
            pod["metadata"]["name"]: pod["spec"]["containers"][0]["image"]
            for pod in await self.pods()
            if "deletionTimestamp" not in pod["metadata"]
        }

    async def events(self) -> list[Json]:
        return [
            event
            for event in await self.find(api.EVENT, self.namespace, "")
            if event["involvedObject"]["kind"] == "LLMDeployment"
        ]

    async def remove(self, resource: Resource, name: str) -> None:
        found = await self.get(resource, self.namespace, name)
        assert found is not None
        await self.delete(resource, self.namespace, name, found["metadata"]["uid"])

    async def versions(self, name: str = "assistant") -> dict[str, str]:
        """resourceVersion of the LLMDeployment and each of its children."""
        wanted = [(api.LLM_DEPLOYMENT, ""), *CHILDREN]
        found = {}
        for resource, suffix in wanted:
            body = await self.get(resource, self.namespace, f"{name}{suffix}")
            if body is not None:
                key = f"{resource.kind} {body['metadata']['name']}"
                found[key] = body["metadata"]["resourceVersion"]
        return found

    async def wait_for(
        self,
        condition: str,
        status: str = "True",
        *,
        reason: str | None = None,
        within: float = 30,
        name: str = "assistant",
    ) -> Json:
        """The condition, once it answers the present spec as asked."""
        found: Json = {}

        async def holds() -> bool:
            nonlocal found
            resource = await self.deployment(name)
            found = condition_of(resource, condition)
            return (
                found.get("status") == status
                and found.get("observedGeneration") == resource["metadata"]["generation"]
                and reason in (None, found["reason"])
            )

        try:
            await until(holds, within)
        except TimeoutError:
            raise AssertionError(f"{condition} is not {status} {reason or ''}: {found}") from None
        return found

    @contextlib.asynccontextmanager
    async def operator(self) -> AsyncIterator[OperatorProcess]:
        """`python -m plimsoll_operator` for this namespace, until the block ends."""
        process = await self.start_operator()
        try:
            yield process
        finally:
            await process.stop()

    async def start_operator(self, *arguments: str) -> OperatorProcess:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "plimsoll_operator",
            f"--namespace={self.namespace}",
            f"--health-port={port}",
            *arguments,
            env={**os.environ, "KUBECONFIG": os.fspath(self.kubeconfig)},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        return OperatorProcess(process, port)


@dataclass
class OperatorProcess:
    process: asyncio.subprocess.Process
    health_port: int
    log: str = ""

    async def kill(self) -> None:
        """SIGKILL: nothing is finished and nothing is cleaned up."""
        self.process.send_signal(signal.SIGKILL)
        await self._collect()

    async def stop(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        await self._collect()

    async def _collect(self) -> None:
        _, errors = await self.process.communicate()
        self.log += (errors or b"").decode()


def condition_of(resource: Json, name: str) -> Json:
    """Empty when there is no such condition."""
    conditions = resource.get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == name), {})


async def until(holds: Callable[[], Awaitable[bool]], within: float) -> None:
    """Raises TimeoutError."""
    deadline = time.monotonic() + within
    while not await holds():
        if time.monotonic() > deadline:
            raise TimeoutError
        await asyncio.sleep(0.1)


class ScriptedEngines:
    """Engines that report what a test says and take every limit; for an operator in this process.

    ``report`` holds fields of EngineReading by name; counters may be functions of the time.
    """

    def __init__(self, **report: Any) -> None:
        self.report: Json = report
        self.limits = Limits()
        self.revision = 0
        self.probe_outcome = ProbeOutcome.PASSED
        self.probed: list[tuple[str, int]] = []

    async def read(
        self, deployment: Deployment, pods: Iterable[Pod]
    ) -> dict[str, EngineReading | Unknown]:
        now = time.time()
        known: Json = {
            "kv_cache_usage": 0.1,
            "running": 0,
            "waiting": 0,
            "preemptions_total": 0.0,
            "started_at": 1.0,
            "max_model_len_admitted": self.limits.max_model_len or deployment.ceiling,
            "max_model_len_ceiling": deployment.ceiling,
            "gpu_memory_utilization": self.limits.gpu_memory_utilization,
            "limits_revision": self.revision,
            "block_size": 16,
            **self.report,
        }
        values = {key: value(now) if callable(value) else value for key, value in known.items()}
        return {pod.name: EngineReading(pod=pod.name, at=now, **values) for pod in pods}

    async def set_limits(
        self, pods: Iterable[Pod], credentials: Credentials, revision: int, limits: Limits
    ) -> dict[str, LimitsOutcome]:
        self.limits, self.revision = limits, revision
        return {
            pod.name: LimitsOutcome(OutcomeKind.APPLIED, pod.name, revision, effective=limits)
            for pod in pods
        }

    def probe(
        self, deployment: Deployment, pod: Pod, *, tokens: int, api_key: str | None
    ) -> Probe | None:
        self.probed.append((pod.uid, tokens))
        return Probe(pod.uid, self.probe_outcome, tokens, "a scripted answer", time.time())


@contextlib.asynccontextmanager
async def operator_in_process(server: ApiServer, engines: Engines) -> AsyncIterator[None]:
    """The same handlers and passes as `python -m plimsoll_operator`, with other engines."""
    stop, ready = asyncio.Event(), asyncio.Event()
    before = os.environ.get("KUBECONFIG")
    os.environ["KUBECONFIG"] = os.fspath(server.kubeconfig)
    task = asyncio.create_task(
        kopf.operator(
            memo=Controller(Options(), engines),
            standalone=True,
            namespaces=[server.namespace],
            stop_flag=stop,
            ready_flag=ready,
        )
    )
    try:
        await asyncio.wait_for(ready.wait(), 30)
        yield
    finally:
        stop.set()
        await task
        if before is None:
            del os.environ["KUBECONFIG"]
        else:
            os.environ["KUBECONFIG"] = before
