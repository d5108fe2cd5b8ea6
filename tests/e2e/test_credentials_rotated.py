"""Certificate and token of a control channel are replaced under real engines, on the local cluster."""

from __future__ import annotations

import base64
import functools
import json
import time
from collections.abc import Iterator

import pytest

from plimsoll_local import models
from support.local_cluster import Json, LocalCluster
from support.serving import Serving, install_operator
from support.tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROTATIONS = 2


@pytest.fixture(scope="module")
def serving(
    local_cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """The operator rotates every minute, the least that it takes."""
    home = tmp_path_factory.mktemp("models")
    home.chmod(0o755)
    write_tiny_model(home / "tiny")
    install_operator(local_cluster, "controlChannel.rotateAfter=60s")
    local_cluster.kubectl("create", "namespace", "rotated")
    serving = Serving(local_cluster, "rotated", models.CLAIM_NAME)
    serving.apply(*models.build_volume(home, "rotated"))
    yield serving
    serving.kubectl("delete", "llmd", "--all")
    install_operator(local_cluster)


def test_every_limit_arrives_through_two_rotations_and_no_pod_is_restarted(
    serving: Serving,
) -> None:
    bounds = {"minAllowed": 128, "maxAllowed": 1024}
    tuning = {"mode": "Off", "maxModelLen": bounds}
    engine = {"maxModelLen": 256, "maxNumSeqs": 8, "maxNumBatchedTokens": 256}
    serving.apply(serving.build("turned", engine=engine, tuning=tuning))
    serving.wait_for("turned", "Ready")
    before, tokens, length, moves = pod(serving), {token(serving)}, 256, 0
    deadline = time.monotonic() + 240
    while len(tokens) <= ROTATIONS or moves < 8:
        assert time.monotonic() < deadline, f"{len(tokens) - 1} rotations, {moves} moves"
        # A live limit each time: the ceiling, which is a flag, stays 1024.
        length = 512 if length == 256 else 256
        patch = json.dumps({"spec": {"engine": {"maxModelLen": length}}})
        serving.kubectl("patch", "llmd", "turned", "--type=merge", "-p", patch)
        serving.cluster.wait_for(
            functools.partial(in_force, serving, length), f"a length of {length}", 30
        )
        moves += 1
        tokens.add(token(serving))
        time.sleep(3)
    log = serving.kubectl("logs", "turned-0")
    assert log.count("the control channel has new credentials") >= ROTATIONS
    after = pod(serving)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0
    events = serving.kubectl("get", "events", "-o", "json")
    reasons = {event["reason"] for event in json.loads(events)["items"]}
    assert "CredentialsRotated" in reasons
    # No secret in what is shown.
    shown = events + log + serving.kubectl("get", "llmd", "turned", "-o", "json")
    assert not any(each in shown for each in tokens)


def in_force(serving: Serving, length: int) -> bool:
    """And nothing failed meanwhile: the condition would say LimitsNotConfirmed."""
    status = (serving.deployment("turned") or {})["status"]
    for condition in status["conditions"]:
        assert condition["reason"] != "LimitsNotConfirmed", condition
    return bool(status.get("effective", {}).get("maxModelLen") == length)


def pod(serving: Serving) -> Json:
    (found,) = serving.pods("turned")
    return found


def token(serving: Serving) -> str:
    body = json.loads(serving.kubectl("get", "secret", "turned-control", "-o", "json"))
    return base64.b64decode(body["data"]["token"]).decode()
