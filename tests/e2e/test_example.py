"""The example manifests, as they are in the repository, serve the real model and know Paris."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll_local import models
from plimsoll_local.binaries import cache_home, ensure_binaries
from support.local_cluster import LocalCluster
from support.serving import OPERATOR_NAMESPACE, Serving, install_operator

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(900)]

MANIFESTS = Path(__file__).parents[2] / "manifests"
QUESTION = {
    "model": models.HUB_NAME,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 16,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def serving(local_cluster: LocalCluster) -> Iterator[Serving]:
    prepared = models.ensure_prepared(cache_home() / "models", print)
    install_operator(local_cluster)
    namespace = f"example-{uuid.uuid4().hex[:6]}"
    local_cluster.kubectl("create", "namespace", namespace)
    serving = Serving(local_cluster, namespace, models.CLAIM_NAME)
    serving.apply(*models.build_volume(prepared.home, namespace))
    yield serving
    serving.kubectl("delete", "llmd", "--all")


def test_helm_test_finds_the_operator(local_cluster: LocalCluster, serving: Serving) -> None:
    done = subprocess.run(
        [ensure_binaries().helm, "test", "plimsoll", "-n", OPERATOR_NAMESPACE, "--timeout", "90s"],
        env={**os.environ, "KUBECONFIG": str(local_cluster.cluster.kubeconfig_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Succeeded" in done.stdout


@pytest.mark.parametrize("manifest", ["llmdeployment", "llmdeployment-tensor-parallel"])
def test_the_example_knows_the_capital_of_france(serving: Serving, manifest: str) -> None:
    path = MANIFESTS / f"{manifest}.yaml"
    name: str = yaml.safe_load(path.read_text())["metadata"]["name"]
    serving.kubectl("apply", "-f", str(path))
    serving.wait_for(name, "Ready", seconds=300)
    answer = serving.post(name, "/v1/chat/completions", QUESTION)
    assert answer.status == 200
    message: dict[str, Any] = answer.body["choices"][0]["message"]
    assert message["content"] == "The capital of France is Paris."
    serving.delete(name)
