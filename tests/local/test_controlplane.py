"""The control plane's failures, with programs that are shell scripts; the real one is in e2e."""

import os
import stat
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from plimsoll_local.binaries import Binaries
from plimsoll_local.controlplane import ControlPlane, ControlPlaneFailed


def make_binaries(folder: Path, **bodies: str) -> Binaries:
    """Programs that wait to be ended, but for those with a body of their own."""
    folder.mkdir()
    paths = {}
    for field in fields(Binaries):
        path = folder / field.name.replace("_", "-")
        path.write_text(f"#!/bin/sh\n{bodies.get(field.name, 'exec sleep 600')}\n")
        path.chmod(0o755)
        paths[field.name] = path
    return Binaries(**paths)


def test_a_component_that_ends_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    binaries = make_binaries(tmp_path / "bin", kube_apiserver="echo no such flag >&2; exit 3")
    plane = ControlPlane(tmp_path / "cluster", binaries)
    with pytest.raises(ControlPlaneFailed, match=r"kube-apiserver ended with status 3:\nno such f"):
        plane.start()
    # etcd, which ran, was stopped again.
    assert not plane.pids


def test_leaving_stops_what_was_launched(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path / "cluster", make_binaries(tmp_path / "bin"))
    plane.launch()
    pids = plane.pids
    assert len(pids) == 2
    assert plane.failed_component() is None
    plane.stop()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_secrets_are_for_their_owner_alone(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path / "cluster", make_binaries(tmp_path / "bin"))
    plane.launch()
    plane.stop()
    folder = tmp_path / "cluster"
    for name in ("kubeconfig", "pki/tokens.csv", "pki/sa.key", "pki/apiserver.key"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    config = yaml.safe_load(plane.kubeconfig.read_text())
    assert config["clusters"][0]["cluster"]["server"] == f"https://127.0.0.1:{plane.port}"
    assert config["users"][0]["user"]["token"] == plane.token
