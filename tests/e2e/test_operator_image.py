"""The operator as it is in its image, user and all, against a real API server.

Opt-in by PLIMSOLL_OPERATOR_IMAGE=1; needs root, buildah and the image (`make images`): what it holds is less than the environment here.
"""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from support.apiserver import ApiServer
from support.gate_harness import free_port
from support.kubelet import FakeKubelet

IMAGE = "localhost/plimsoll/operator:0.1.0"


def is_built() -> bool:
    if (
        "PLIMSOLL_OPERATOR_IMAGE" not in os.environ
        or os.geteuid() != 0
        or shutil.which("buildah") is None
    ):
        return False
    found = subprocess.run(
        ["buildah", "inspect", "--type", "image", IMAGE], check=False, capture_output=True
    )
    return found.returncode == 0


pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        not is_built(), reason="opt-in: PLIMSOLL_OPERATOR_IMAGE=1, root and `make images`"
    ),
]


@pytest.fixture
def container() -> Iterator[str]:
    name = subprocess.run(["buildah", "from", IMAGE], capture_output=True, text=True, check=True)
    yield name.stdout.strip()
    subprocess.run(["buildah", "rm", name.stdout.strip()], capture_output=True, check=True)


@pytest.fixture
def access(server: ApiServer, tmp_path: Path) -> Path:
    """A folder that anybody may read, with a kubeconfig that names no other file."""
    kubeconfig = yaml.safe_load(server.kubeconfig.read_text())
    for each in kubeconfig["clusters"]:
        authority = Path(each["cluster"].pop("certificate-authority")).read_bytes()
        each["cluster"]["certificate-authority-data"] = base64.b64encode(authority).decode()
    tmp_path.chmod(0o755)
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
    return tmp_path


@asynccontextmanager
async def operator(container: str, access: Path, namespace: str) -> AsyncIterator[None]:
    """Run until left, and then told to stop, which it has to do by itself."""
    process = await asyncio.create_subprocess_exec(
        *("buildah", "run", "--isolation", "chroot", "--network", "host"),
        *(
            "--volume",
            f"{access}:/kube:ro",
            "--env",
            "KUBECONFIG=/kube/kubeconfig",
            container,
            "--",
        ),
        *("python", "-m", "plimsoll_operator", f"--namespace={namespace}"),
        *("--leader-elect", f"--lease-namespace={namespace}", f"--health-port={free_port()}"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 30)
        print(errors.decode())


async def test_it_makes_a_deployment_ready(
    container: str, access: Path, server: ApiServer, kubelet: FakeKubelet
) -> None:
    async with operator(container, access, server.namespace):
        await server.create_deployment()
        await server.wait_for("Ready", within=90)
