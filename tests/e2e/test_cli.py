"""The real `kubectl plimsoll ...` as a plugin, against a real API server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll_local.binaries import Binaries, ensure_binaries
from plimsoll_operator.cli.mode import MODE_ANNOTATION
from plimsoll_operator.cli.permissions import (
    GROUP_RULES,
    OPERATOR_RULES,
    POOL_RULES,
    Rule,
    accesses,
)
from support.apiserver import ApiServer, ScriptedEngines, operator_in_process
from support.kubelet import FakeKubelet

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

Json = dict[str, Any]
CHART = Path(__file__).parents[2] / "charts" / "plimsoll"


class Kubectl:
    """kubectl with the plugin on its PATH, as it lies beside this environment's Python."""

    def __init__(self, binaries: Binaries, kubeconfig: Path, home: Path) -> None:
        self._kubectl = binaries.kubectl
        scripts = os.fspath(Path(sys.executable).parent)
        self._environment = {
            "PATH": os.pathsep.join((scripts, os.environ["PATH"])),
            "HOME": os.fspath(home),
            "KUBECONFIG": os.fspath(kubeconfig),
        }

    async def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Beside the operator and the kubelet, which live in this process."""
        process = await asyncio.create_subprocess_exec(
            self._kubectl,
            *arguments,
            env=self._environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await asyncio.wait_for(process.communicate(stdin.encode()), 60)
        assert process.returncode is not None
        assert "Traceback" not in errors.decode()
        return subprocess.CompletedProcess(
            arguments, process.returncode, output.decode(), errors.decode()
        )

    async def plimsoll(self, *arguments: str) -> str:
        done = await self.run("plimsoll", *arguments)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    async def refused(self, *arguments: str) -> str:
        done = await self.run("plimsoll", *arguments)
        assert done.returncode == 1, done.stderr + done.stdout
        return done.stderr


def render_chart(binaries: Binaries, namespace: str, *values: str) -> list[Json]:
    """Without the definitions; the release has the namespace's name."""
    settings = ",".join(("crds.install=false", *values))
    arguments = ("template", namespace, CHART, "-n", namespace, "--set", settings)
    rendered = subprocess.run(
        [binaries.helm, *arguments], capture_output=True, text=True, check=True
    ).stdout
    return [body for body in yaml.safe_load_all(rendered) if body is not None]


@pytest.fixture(scope="module")
def binaries() -> Binaries:
    return ensure_binaries()


@pytest.fixture
def kubectl(binaries: Binaries, server: ApiServer, tmp_path: Path) -> Kubectl:
    return Kubectl(binaries, server.kubeconfig, tmp_path)


async def test_a_deployment_is_shown_explained_held_and_resumed(
    server: ApiServer, kubelet: FakeKubelet, kubectl: Kubectl
) -> None:
    here = ("-n", server.namespace)
    async with operator_in_process(server, ScriptedEngines()):
        await server.create_deployment(engine={"maxModelLen": 2048, "gpuMemoryUtilization": 0.8})
        await server.wait_for("Ready", within=60)

        title, line = (await kubectl.plimsoll("top", "--once", *here)).splitlines()
        assert title.split()[:4] == ["NAMESPACE", "NAME", "READY", "STATE"]
        assert line.split()[:6] == [server.namespace, "assistant", "1/1", "Ready", "2048", "0.80"]

        text = await kubectl.plimsoll("explain", "assistant", *here)
        assert "requests up to 2048 tokens are admitted now" in text
        assert "the spec starts at length 2048 and utilisation 0.80" in text
        history = await kubectl.plimsoll("history", "assistant", *here)
        assert "the tuner has moved nothing yet" in history

        # What pin prints is something that the API server takes.
        pinned = await kubectl.plimsoll("pin", "assistant", *here)
        assert yaml.safe_load(pinned)["spec"]["engine"]["maxModelLen"] == 2048
        patch = ("--type=merge", "--patch-file=/dev/stdin", "--dry-run=server")
        done = await kubectl.run("patch", "llmd", "assistant", *here, *patch, stdin=pinned)
        assert done.returncode == 0, done.stderr

        held = await kubectl.plimsoll("hold", "assistant", *here)
        assert "tuning.mode was not set (Auto), now Hold" in held
        await server.wait_for("TuningActive", "False", reason="Hold")
        annotations = (await server.deployment())["metadata"]["annotations"]
        assert annotations == {MODE_ANNOTATION: "unset"}
        (row,) = json.loads(await kubectl.plimsoll("top", "-o", "json", *here))
        assert (row["state"], row["length"], row["kv_percent"]) == ("Ready, Hold", 2048, 10)

        resumed = await kubectl.plimsoll("resume", "assistant", *here)
        assert "tuning.mode was Hold, now not set (Auto)" in resumed
        found = await server.deployment()
        assert "mode" not in found["spec"]["tuning"]
        assert "annotations" not in found["metadata"]
        await server.wait_for("TuningActive")

        # What is not there is answered with what is.
        error = await kubectl.refused("explain", "asistant", *here)
        assert error == (
            f"error: namespace {server.namespace} has no LLMDeployment asistant: there are "
            "assistant\n"
        )


async def test_who_may_not_look_is_told_what_is_missing(
    server: ApiServer, kubectl: Kubectl, binaries: Binaries, tmp_path: Path
) -> None:
    await kubectl.run("create", "serviceaccount", "guest", "-n", server.namespace)
    token = (await kubectl.run("create", "token", "guest", "-n", server.namespace)).stdout.strip()
    config = yaml.safe_load(server.kubeconfig.read_text())
    for user in config["users"]:
        user["user"] = {"token": token}
    for context in config["contexts"]:
        context["context"]["namespace"] = server.namespace
    path = tmp_path / "guest"
    path.write_text(yaml.safe_dump(config))
    guest = Kubectl(binaries, path, tmp_path)

    error = await guest.refused("top", "--once")
    assert f"you may not list llmdeployments in namespace {server.namespace}" in error
    error = await guest.refused("hold", "assistant")
    assert f"you may not get llmdeployments in namespace {server.namespace}" in error
    done = await guest.run("plimsoll", "doctor")
    assert done.returncode == 1
    assert "problem  your permissions: you may not get llmdeployments.plimsoll.dev" in done.stdout
    assert "note     definitions: not checked: you may not read them" in done.stdout
    assert "note     operator: not checked: you may not list deployments" in done.stdout


async def test_the_doctor_finds_what_is_missing(
    server: ApiServer, kubectl: Kubectl, binaries: Binaries
) -> None:
    """Definitions but no operator; then the chart's operator without its role; then with it."""
    here = ("-n", server.namespace)
    bodies = render_chart(binaries, server.namespace)
    roles = [body for body in bodies if "rbac" in body["apiVersion"]]
    others = [body for body in bodies if body not in roles]

    async def apply(parts: list[Json]) -> None:
        done = await kubectl.run("apply", *here, "-f", "-", stdin=yaml.safe_dump_all(parts))
        assert done.returncode == 0, done.stderr

    first = await kubectl.run("plimsoll", "doctor", *here)
    assert "ok       llmdeployments.plimsoll.dev: v1alpha1, as of this version" in first.stdout
    assert "ok       memoryprofiles.plimsoll.dev: v1alpha1, as of this version" in first.stdout
    assert "ok       your permissions: enough for every command" in first.stdout
    assert first.returncode == 1
    assert "problem  operator: no Deployment has the label" in first.stdout

    try:
        await apply(others)
        second = await kubectl.run("plimsoll", "doctor", *here)
        # Nothing runs pods in this cluster.
        assert f"operator {server.namespace}/{server.namespace}-plimsoll: 0/1" in second.stdout
        assert "problem  operator's permissions: it may not get llmdeployments" in second.stdout
        await apply(roles)
        third = await kubectl.run("plimsoll", "doctor", *here, "-o", "json")
        (permissions,) = [
            finding
            for finding in json.loads(third.stdout)
            if finding["subject"] == "operator's permissions"
        ]
        assert permissions["level"] == "ok", permissions
    finally:
        # What is of the whole cluster must not be left to the other tests.
        await kubectl.run("delete", "--wait=false", "-f", "-", stdin=yaml.safe_dump_all(roles))

    assert granted(roles) == wanted(OPERATOR_RULES)
    # With what only some LLMDeployments ask for.
    further = ("leaderWorkerSet.enabled=true", "inferencePool.enabled=true")
    bodies = render_chart(binaries, server.namespace, *further)
    assert granted(bodies) == wanted((*OPERATOR_RULES, *GROUP_RULES, *POOL_RULES))


def wanted(rules: Iterable[Rule]) -> set[tuple[str, str, str]]:
    return {(each.verb, each.group, each.resource) for each in accesses(rules, None)}


def granted(bodies: Iterable[Json]) -> set[tuple[str, str, str]]:
    """By the chart's roles: cli/permissions.py and they belong together."""
    return {
        (verb, group, resource)
        for role in bodies
        if "rbac" in role["apiVersion"]
        for rule in role.get("rules", ())
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


async def test_a_plan_needs_no_cluster(
    kubectl: Kubectl, binaries: Binaries, tmp_path: Path
) -> None:
    example = Path(__file__).parents[2] / "manifests" / "llmdeployment.yaml"
    alone = Kubectl(binaries, tmp_path / "no-kubeconfig", tmp_path)
    text = await alone.plimsoll("plan", "-f", os.fspath(example))
    assert "StatefulSet  assistant          the engine pods" in text
    # The children are objects that the real API server takes.
    children = await alone.plimsoll("plan", "-f", os.fspath(example), "-o", "yaml")
    done = await kubectl.run("apply", "--dry-run=client", "-f", "-", stdin=children)
    assert done.returncode == 0, done.stderr
