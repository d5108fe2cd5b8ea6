"""LLMDeployments on the local cluster, for end-to-end tests: apply, wait, chat, kill.

In: the running cluster with the operator installed, a folder with a tiny model. Out: what a user
would do and see, through kubectl, the API server and the Service.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from plimsoll_local.binaries import ensure_binaries
from support.local_cluster import Json, LocalCluster

API = "/apis/plimsoll.dev/v1alpha1"
OPERATOR_NAMESPACE = "plimsoll-system"
# The tiny model needs little beyond the runtime itself, which is about 400 MiB.
MEMORY = "768Mi"


def install_operator(cluster: LocalCluster, *values: str) -> None:
    """By the real chart and the real Helm; once per cluster is enough, but for other values."""
    chart = Path(__file__).parents[2] / "charts" / "plimsoll"
    subprocess.run(
        [
            ensure_binaries().helm, "upgrade", "--install", "plimsoll", chart,
            "--namespace", OPERATOR_NAMESPACE, "--create-namespace", "--wait", "--timeout", "180s",
            *(f"--set={value}" for value in values),
        ],
        check=True, env={**os.environ, "KUBECONFIG": str(cluster.cluster.kubeconfig_path)},
    )  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """An HTTP answer: status and the JSON body."""

    status: int
    body: Json


@dataclass(frozen=True)
class Serving:
    """One namespace in which tiny models can be served."""

    cluster: LocalCluster
    namespace: str
    claim: str

    def build(self, name: str, **spec: Any) -> Json:
        """A deployment of the tiny model; `spec` replaces whole sections."""
        return {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {
                "model": {"uri": f"pvc://{self.claim}/tiny", "servedName": "tiny"},
                "accelerator": {"resourceName": ""},
                "engine": {"maxModelLen": 1024, "maxNumSeqs": 8, "maxNumBatchedTokens": 256},
                "monitoring": {"scrapeInterval": "2s"},
                "drain": "5s",
                "resources": {
                    "requests": {"cpu": "50m", "memory": MEMORY},
                    "limits": {"cpu": "1", "memory": MEMORY},
                },
                **spec,
            },
        }

    def apply(self, *documents: Json) -> None:
        listing = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(listing))

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl("-n", self.namespace, *arguments, stdin=stdin)

    def refuse(self, document: Json) -> str:
        """What the API server says to a document that it refuses."""
        try:
            self.kubectl("apply", "-f", "-", stdin=json.dumps(document))
        except subprocess.CalledProcessError as error:
            return str(error.stderr)
        raise AssertionError("the document was accepted")

    def deployment(self, name: str) -> Json | None:
        return self.cluster.get(f"{API}/namespaces/{self.namespace}/llmdeployments/{name}")

    def pods(self, name: str) -> list[Json]:
        selector = f"plimsoll.dev%2Fdeployment%3D{name}"
        path = f"/api/v1/namespaces/{self.namespace}/pods?labelSelector={selector}"
        return list((self.cluster.get(path) or {"items": []})["items"])

    def children(self, name: str) -> list[str]:
        """What is left of it, pods included, as kind/name."""
        kinds, label = "sts,svc,secret,cm,pdb,pods", f"plimsoll.dev/deployment={name}"
        return self.kubectl("get", kinds, "-l", label, "-o", "name").split()

    def condition(self, name: str, kind: str) -> Json:
        """A condition that was judged for the present generation, or {}."""
        found = self.deployment(name) or {}
        for condition in found.get("status", {}).get("conditions", ()):
            generation = found["metadata"]["generation"]
            if condition["type"] == kind and condition["observedGeneration"] == generation:
                return dict(condition)
        return {}

    def wait_for(self, name: str, kind: str, status: str = "True", seconds: float = 180) -> Json:
        """The condition as soon as it has this status."""

        def read() -> Json | None:
            found = self.condition(name, kind)
            return found if found.get("status") == status else None

        return self.cluster.wait_for(read, f"{name} to have {kind} {status}", seconds)

    def post(self, name: str, path: str, body: Json) -> Answer:
        """POST to the deployment's Service."""
        with self.cluster.cluster.proxy(self.namespace, name, 80) as url:
            request = urllib.request.Request(
                url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=120) as response:
                    return Answer(response.status, json.load(response))
            except urllib.error.HTTPError as error:
                with error:
                    return Answer(error.code, json.load(error))

    def chat(self, name: str, text: str = "hello", max_tokens: int = 8) -> Answer:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        return self.post(name, "/v1/chat/completions", body)

    def kill_engine(self, pod: str) -> None:
        """SIGKILL to the engine's own process, as the kernel or a colleague would do it."""
        self._kill("plimsoll_engine", pod)

    def kill_vllm(self, pod: str) -> None:
        """SIGKILL to the scripted vLLM, not to the launcher before it."""
        self._kill_those(lambda process: process.cmdline()[2:3] == ["serve"], "vllm", pod)

    def kill_operator(self) -> None:
        path = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods"
        (pod,) = (self.cluster.get(path) or {})["items"]
        self._kill("plimsoll_operator", pod["metadata"]["name"])

    def _kill(self, module: str, pod: str) -> None:
        # The container's own process, not the shim that has the same words among its arguments.
        self._kill_those(lambda process: process.cmdline()[1:3] == ["-m", module], module, pod)

    def _kill_those(self, holds: Callable[[psutil.Process], bool], what: str, pod: str) -> None:
        supervisor = psutil.Process(self.cluster.cluster.processes()[0])
        found = []
        for process in supervisor.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if holds(process) and process.environ().get("HOSTNAME") == pod:
                    found.append(process)
        assert found, f"no process of {what} in pod {pod}"
        for process in found:
            process.kill()

    def delete(self, name: str) -> None:
        self.kubectl("delete", "llmd", name, "--wait=false")
        self.cluster.wait_for(lambda: self.deployment(name) is None, f"{name} to be gone")
