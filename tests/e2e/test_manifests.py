"""Every example is accepted by the real API server under strict validation, and can be built."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from plimsoll_local.binaries import ensure_binaries
from plimsoll_operator.desired.pod import build_pod_template
from plimsoll_operator.spec import Deployment
from support.apiserver import ApiServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

MANIFESTS = sorted((Path(__file__).parents[2] / "manifests").glob("llmdeployment*.yaml"))


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
async def test_an_example_is_accepted(server: ApiServer, manifest: Path) -> None:
    deployment = Deployment.parse(yaml.safe_load(_create(server, manifest)))
    template = build_pod_template(deployment, "engine")
    (container,) = template["spec"]["containers"]
    assert f"--tensor-parallel-size={deployment.tensor_parallel_size}" in container["args"]


def _create(server: ApiServer, manifest: Path) -> str:
    """The object as the API server would store it."""
    arguments = ["create", "--dry-run=server", "--validate=strict", "--output=yaml"]
    done = subprocess.run(
        [
            ensure_binaries().kubectl,
            *arguments,
            f"--namespace={server.namespace}",
            f"--filename={manifest}",
        ],
        env={**os.environ, "KUBECONFIG": os.fspath(server.kubeconfig)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
