"""The engine's image under a real kubelet and containerd: served, killed by the kernel for its memory,
classified, and tuned.

Opt-in, as root, with `make images` done for the engine: `make e2e-kubelet` (containerd, runc, CNI's
plugins and buildah are Debian's packages).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll_local import models
from plimsoll_local.binaries import cache_home
from support.apiserver import OperatorProcess
from support.real_kubelet import PAUSE, RealCluster, real_cluster

Json = dict[str, Any]
ROOT = Path(__file__).parents[2]
ENGINE = "localhost/plimsoll/engine:0.1.0"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1500),
    pytest.mark.skipif("PLIMSOLL_REAL_KUBELET" not in os.environ, reason="make e2e-kubelet"),
]


@pytest.fixture(scope="module")
def archives() -> list[Path]:
    """PLIMSOLL_REAL_KUBELET names the engine's archive; a sandbox needs nothing but to sleep."""
    engine = Path(os.environ["PLIMSOLL_REAL_KUBELET"])
    pause = engine.with_name("pause.tar")
    if not pause.exists():
        script = (
            'c=$(buildah from localhost/plimsoll-base:bookworm) && buildah config --cmd "" '
            '--entrypoint \'["sleep", "infinity"]\' "$c" && buildah commit --quiet --rm "$c" "$1" '
            '&& buildah push --quiet "$1" "docker-archive:$2:$1"'
        )
        subprocess.run(["bash", "-c", script, "bash", PAUSE, pause], check=True)
    return [pause, engine]


@pytest.fixture(scope="module")
def cluster(
    archives: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealCluster]:
    with real_cluster(tmp_path_factory.mktemp("real"), archives) as cluster:
        for definition in sorted((ROOT / "crds").glob("*.yaml")):
            cluster.kubectl("create", "-f", str(definition))
        volume = models.build_volume(
            models.ensure_prepared(cache_home() / "models", print).home, "default"
        )
        for body in volume:
            cluster.kubectl("create", "-f", "-", stdin=json.dumps(body))
        yield cluster


def status(cluster: RealCluster) -> Json:
    found: Json = json.loads(cluster.kubectl("get", "llmd", "assistant", "-o", "json"))
    told: Json = found.get("status", {})
    return told


def condition(cluster: RealCluster, kind: str) -> str:
    conditions = status(cluster).get("conditions", [])
    return next((each["status"] for each in conditions if each["type"] == kind), "")


def wait(cluster: RealCluster, holds: Callable[[], bool], within: float) -> None:
    deadline = time.monotonic() + within
    while not holds():
        if time.monotonic() > deadline:
            pods = cluster.kubectl("describe", "pods")
            raise AssertionError(json.dumps(status(cluster), indent=1) + pods[-6000:])
        time.sleep(1)


async def test_a_kill_by_the_kernel_is_classified_and_acted_on(cluster: RealCluster) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "plimsoll_operator", f"--engine-image={ENGINE}"),
        env=os.environ | {"KUBECONFIG": str(cluster.kubeconfig)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    operator = OperatorProcess(process, 8080)
    try:
        await asyncio.to_thread(tell_the_story, cluster)
    finally:
        await operator.stop()
        print(operator.log[-4000:])


def tell_the_story(cluster: RealCluster) -> None:
    example = yaml.safe_load((ROOT / "manifests" / "llmdeployment.yaml").read_text())
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(example))
    wait(cluster, lambda: condition(cluster, "Ready") == "True", 600)
    before = status(cluster)["effective"]["gpuMemoryUtilization"]

    pod = json.loads(cluster.kubectl("get", "pod", "assistant-0", "-o", "json"))
    container = pod["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
    # Beside the engine, in its cgroup: the kernel takes the larger of the two.
    hog = "b = []\nwhile True: b.append(bytearray(8 << 20))"
    subprocess.run(
        [
            *("ctr", "--address", cluster.socket, "--namespace", "k8s.io", "tasks", "exec"),
            *("--exec-id", "hog", container, "/opt/plimsoll/bin/python", "-c", hog),
        ],
        capture_output=True,
        timeout=120,
        check=False,
    )

    def killed() -> bool:
        found = json.loads(cluster.kubectl("get", "pod", "assistant-0", "-o", "json"))
        ended = found["status"]["containerStatuses"][0].get("lastState", {}).get("terminated", {})
        return (ended.get("reason"), ended.get("exitCode")) == ("OOMKilled", 137)

    wait(cluster, killed, 120)
    wait(cluster, lambda: status(cluster)["oom"]["total"] == 1, 60)
    assert status(cluster)["oom"]["last"]["class"] == "CgroupOOM"
    wait(cluster, lambda: condition(cluster, "Ready") == "True", 300)
    after = status(cluster)
    assert after["effective"]["gpuMemoryUtilization"] < before
    assert after["tuning"]["history"][-1]["rule"] == "oom"
    print(json.dumps({key: after[key] for key in ("effective", "oom")}, indent=1))
