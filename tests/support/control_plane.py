"""A real API server with the controllers, on loopback and without nodes, for a test module.

Use by ``pytest_plugins``-free import in a conftest: ``from support.control_plane import
control_plane``.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from plimsoll_local.binaries import ensure_binaries
from plimsoll_local.controlplane import Component, ControlPlane


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    folder: Path = tmp_path_factory.mktemp("controlplane")
    components = frozenset({Component.CONTROLLER_MANAGER})
    with ControlPlane(folder, ensure_binaries(), components) as plane:
        yield plane
