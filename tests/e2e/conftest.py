"""A real API server and StatefulSet controller on loopback, with a kubelet that runs nothing.

Started once for all tests; each test works in a namespace of its own.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import yaml
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from plimsoll_local.binaries import ensure_binaries
from plimsoll_local.controlplane import Component, ControlPlane
from support.apiserver import ApiServer
from support.kubelet import FakeKubelet

CRDS = Path(__file__).parents[2] / "crds"


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """etcd, API server and controller-manager; no scheduler and no node."""
    plane = ControlPlane(
        tmp_path_factory.mktemp("control-plane"),
        ensure_binaries(),
        frozenset({Component.CONTROLLER_MANAGER}),
    )
    with plane:
        asyncio.run(_install_crds(plane))
        yield plane


@pytest.fixture
async def server(control_plane: ControlPlane) -> AsyncIterator[ApiServer]:
    """A connection with a fresh namespace."""
    async with await _connect(control_plane) as api:
        server = ApiServer(api, control_plane.kubeconfig, f"test-{uuid.uuid4().hex[:8]}")
        await server.create_namespace()
        yield server
    await _wait_for_closed_connections(str(api.configuration.host))


@pytest.fixture
async def kubelet(server: ApiServer) -> AsyncIterator[FakeKubelet]:
    async with FakeKubelet(server.api, server.namespace) as kubelet:
        yield kubelet


async def _wait_for_closed_connections(url: str) -> None:
    """Until TLS has said goodbye on each connection that this test had. An operator in this process
    closes its watches without waiting, and the event loop must not end before them."""
    port = urlsplit(url).port
    me = psutil.Process()
    deadline = time.monotonic() + 10
    while left := [
        each for each in me.net_connections("tcp4") if each.raddr and each.raddr.port == port
    ]:
        assert time.monotonic() < deadline, f"connections are still open: {left}"
        await asyncio.sleep(0.01)


async def _connect(plane: ControlPlane) -> ApiClient:
    configuration = Configuration()
    await config.load_kube_config(
        config_file=os.fspath(plane.kubeconfig), client_configuration=configuration
    )
    return ApiClient(configuration)


async def _install_crds(plane: ControlPlane) -> None:
    async with await _connect(plane) as api:
        server = ApiServer(api, plane.kubeconfig, "default")
        for path in sorted(CRDS.glob("*.yaml")):
            await server.install_crd(yaml.safe_load(path.read_text()))
