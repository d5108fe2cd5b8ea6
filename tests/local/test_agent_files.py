"""Mounted content, /etc/hosts, images and logs: what is written, and how it is read back."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from plimsoll_local.agent.agent import attempt_to_show
from plimsoll_local.agent.atomic import File, write_files
from plimsoll_local.agent.content import referenced_objects, token_wishes, volume_files
from plimsoll_local.agent.environment import ConfigurationError, Facts
from plimsoll_local.agent.hosts import hosts_file
from plimsoll_local.agent.images import ImageTable, ImageTableError
from plimsoll_local.agent.logs import (
    LineWriter,
    LogOptions,
    read_log,
    read_new_lines,
    tail_text,
)
from plimsoll_local.agent.node import NodeIdentity, build_node_status
from plimsoll_local.agent.server import parse_log_options
from plimsoll_local.agent.state import ContainerState, Running, Terminated, Waiting
from plimsoll_local.agent.unsupported import ignored_fields
from support.pods import Json, build_container, build_pod

ENDED = Terminated(1, "Error", "", 0.0, 1.0, "plimsoll://x")
FACTS = Facts("10.244.0.1", "10.244.0.7", "node-1", {})


class Objects:
    def secret(self, namespace: str, name: str) -> Json | None:
        data = {"user": base64.b64encode(b"me").decode(), "key": base64.b64encode(b"k").decode()}
        return {"data": data} if name == "s" else None

    def config_map(self, namespace: str, name: str) -> Json | None:
        found = {"data": {"a": "1"}, "binaryData": {"b": base64.b64encode(b"\xff").decode()}}
        return found if name == "c" else None

    def services(self) -> list[Json]:
        return []


def files(volume: Json, pod: Json | None = None, **tokens: str) -> dict[str, File]:
    wishes = {("", 3607): tokens.get("token", "")}
    return volume_files(pod or build_pod(), volume, Objects(), FACTS, wishes)


def test_all_keys_or_only_the_items_with_their_modes() -> None:
    assert files({"name": "v", "secret": {"secretName": "s", "defaultMode": 0o400}}) == {
        "user": File(b"me", 0o400),
        "key": File(b"k", 0o400),
    }
    item = {"key": "user", "path": "deep/name", "mode": 0o440}
    assert files({"name": "v", "secret": {"secretName": "s", "items": [item]}}) == {
        "deep/name": File(b"me", 0o440)
    }
    assert files({"name": "v", "configMap": {"name": "c"}}) == {
        "a": File(b"1", 0o644),
        "b": File(b"\xff", 0o644),
    }


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"secret": {"secretName": "no"}}, 'secret "no" not found'),
        ({"configMap": {"name": "no"}}, 'configmap "no" not found'),
        (
            {"configMap": {"name": "c", "items": [{"key": "x", "path": "x"}]}},
            'non-existent configmap "c" key: x',
        ),
        ({"projected": {"sources": [{"clusterTrustBundle": {}}]}}, "clusterTrustBundle"),
    ],
)
def test_what_cannot_be_shown_is_named(source: Json, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        files({"name": "v", **source})


def test_optional_content_may_be_missing() -> None:
    assert files({"name": "v", "secret": {"secretName": "no", "optional": True}}) == {}


def test_a_projected_volume_joins_its_sources() -> None:
    token = {"path": "token", "expirationSeconds": 3607}
    label = {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}
    volume = {
        "name": "v",
        "projected": {
            "defaultMode": 0o600,
            "sources": [
                {"serviceAccountToken": token},
                {"configMap": {"name": "c", "items": [{"key": "a", "path": "ca.crt"}]}},
                {"downwardAPI": {"items": [label]}},
            ],
        },
    }
    pod = build_pod(metadata={"labels": {"app": "x"}}, volumes=[volume])
    assert list(token_wishes(volume)) == [("", 3607)]
    assert files(volume, pod, token="t") == {
        "token": File(b"t", 0o600),
        "ca.crt": File(b"1", 0o600),
        "labels": File(b'app="x"', 0o600),
    }
    container = build_container(
        env=[{"name": "X", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]
    )
    pod["spec"]["containers"] = [container]
    assert referenced_objects(pod) == {("configMap", "c"), ("secret", "s")}


def test_content_changes_all_at_once(tmp_path: Path) -> None:
    directory = tmp_path / "v"
    assert write_files(directory, {"a": File(b"1", 0o600), "d/b": File(b"2", 0o644)})
    assert (directory / "a").read_bytes() == b"1"
    assert (directory / "a").stat().st_mode & 0o777 == 0o600
    # A reader that has opened the current generation keeps a whole one.
    held = (directory / "a").open("rb")
    assert write_files(directory, {"a": File(b"3", 0o600), "c": File(b"4", 0o644)})
    with held:
        assert held.read() == b"1"
    visible = {path.name for path in directory.iterdir() if not path.name.startswith("..")}
    assert visible == {"a", "c"}
    assert (directory / "c").read_bytes() == b"4"
    # One link, one generation: nothing else is left.
    assert len(list(directory.glob("..*"))) == 2
    assert not write_files(directory, {"a": File(b"3", 0o600), "c": File(b"4", 0o644)})


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "..data", ""])
def test_a_path_may_not_leave_the_volume(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match="invalid path"):
        write_files(tmp_path / "v", {path: File(b"", 0o644)})


def test_hosts_name_the_pod_its_aliases_services_and_subdomain_neighbours() -> None:
    pod = build_pod(
        name="web-0",
        hostname="web-0",
        subdomain="web",
        hostAliases=[{"ip": "1.2.3.4", "hostnames": ["x", "y"]}],
    )
    other = build_pod(
        name="web-1", hostname="web-1", subdomain="web", status={"podIP": "10.244.0.9"}
    )
    services = [
        {"metadata": {"name": "db", "namespace": "default"}, "spec": {"clusterIP": "10.0.0.5"}},
        {"metadata": {"name": "far", "namespace": "n"}, "spec": {"clusterIP": "10.0.0.6"}},
        {"metadata": {"name": "web", "namespace": "default"}, "spec": {"clusterIP": "None"}},
    ]
    text = hosts_file(pod, "10.244.0.8", services, [pod, other])
    table = dict(line.split("\t") for line in text.splitlines() if "\t" in line)
    assert table["10.244.0.8"].split()[0] == "web-0.web.default.svc.cluster.local"
    assert table["10.244.0.8"].split()[-1] == "web-0"
    assert table["1.2.3.4"] == "x y"
    assert table["10.0.0.5"].split() == [
        "db.default.svc.cluster.local",
        "db.default.svc",
        "db.default",
        "db",
    ]
    assert "far" not in table["10.0.0.6"].split()
    assert "web-1.web.default.svc" in table["10.244.0.9"].split()


def table(tmp_path: Path, content: Any) -> ImageTable:
    path = tmp_path / "images.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return ImageTable(path)


def test_an_image_is_found_by_its_usual_names(tmp_path: Path) -> None:
    images = table(tmp_path, {"a/b:1": {"entrypoint": ["x"], "command": ["y"]}, "c:latest": {}})
    found = images.find("docker.io/a/b:1")
    assert found is not None
    assert found.argv(None, None) == ("x", "y")
    assert found.argv(None, ["z"]) == ("x", "z")
    assert found.argv(["w"], None) == ("w",)
    assert images.find("c") is not None
    assert images.find("a/b:2") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "image table .*images.json"),
        ([], "must be an object"),
        ({"a": {"enty": []}}, "image a: unknown field enty"),
        ({"a": {"command": "sh"}}, "command must be a list"),
    ],
)
def test_a_bad_table_says_what_is_wrong(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ImageTableError, match=message):
        table(tmp_path, content).find("a")


def write_log(path: Path, *chunks: bytes) -> None:
    sink = BytesIO()
    times = iter(range(1000))
    writer = LineWriter(sink, "stdout", lambda: float(next(times)))
    for chunk in chunks:
        writer.write(chunk)
    writer.flush()
    path.write_bytes(sink.getvalue())


def test_a_log_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    long = b"x" * 40_000
    write_log(path, b"one\ntw", b"o\r\n", long + b"\nlast")
    assert read_log(path, LogOptions())[0] == b"one\ntwo\r\n" + long + b"\nlast\n"
    assert {line.split()[2] for line in path.read_bytes().splitlines()} == {b"P", b"F"}
    assert read_log(path, LogOptions(tail_lines=1))[0] == b"last\n"
    assert read_log(path, LogOptions(limit_bytes=5))[0] == b"one\nt"
    stamped = read_log(path, LogOptions(timestamps=True))[0]
    assert stamped.startswith(b"1970-01-01T00:00:00.000000000Z one\n")
    assert read_log(path, LogOptions(since=3.0))[0].endswith(b"last\n")
    assert b"one" not in read_log(path, LogOptions(since=1.0))[0]
    assert tail_text(path, 1, 3) == "st\n"


def test_a_follower_gets_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    write_log(path, b"one\n")
    _, offset = read_log(path, LogOptions())
    assert read_new_lines(path, offset, LogOptions()) == (b"", offset)
    with path.open("ab") as file:
        file.write(b"1970-01-01T00:00:09.000000000Z stdout F two\n1970-01-")
    text, after = read_new_lines(path, offset, LogOptions())
    assert text == b"two\n"
    assert after < path.stat().st_size


@pytest.mark.parametrize(
    ("state", "last", "current", "previous"),
    [
        # The container has been started three times: attempts 0, 1 and 2.
        (Running(0.0), ENDED, 2, 1),
        (ENDED, ENDED, 2, 1),
        (Waiting("CrashLoopBackOff"), ENDED, 2, 2),
    ],
)
def test_the_log_of_which_start_is_meant(
    state: Running | Waiting | Terminated, last: Terminated, current: int, previous: int
) -> None:
    container = ContainerState(state, last=last, restart_count=2)
    assert attempt_to_show(container, previous=False) == current
    assert attempt_to_show(container, previous=True) == previous


def test_a_first_start_has_no_previous_one() -> None:
    assert attempt_to_show(ContainerState(Running(0.0)), previous=True) is None


def test_log_options_are_read_from_the_query() -> None:
    query = {"follow": "true", "tailLines": "5", "sinceSeconds": "10", "timestamps": "1"}
    expected = LogOptions(follow=True, timestamps=True, tail_lines=5, since=90.0)
    assert parse_log_options(query, now=100.0) == expected
    with pytest.raises(ValueError, match="tailLines='-1': must be a whole number"):
        parse_log_options({"tailLines": "-1"}, now=0)


def test_wishes_that_are_not_met_are_said() -> None:
    container = build_container(
        ports=[{"containerPort": 1, "hostPort": 1}], livenessProbe={"grpc": {"port": 1}}
    )
    found = ignored_fields(build_pod(containers=(container,), hostPID=True))
    assert [text.split()[0] for text in found] == ["spec.hostPID", "hostPort", "livenessProbe"]
    assert ignored_fields(build_pod()) == ()


def test_a_node_offers_what_it_has_and_is_ready() -> None:
    capacity = {"cpu": "2", "nvidia.com/gpu": "4"}
    status = build_node_status(
        NodeIdentity("n", "10.244.0.1", 10250), capacity, ("a:1",), 0.0, 60.0
    )
    assert status["allocatable"] == status["capacity"] == capacity
    times = {(c["lastTransitionTime"], c["lastHeartbeatTime"]) for c in status["conditions"]}
    assert times == {("1970-01-01T00:00:00Z", "1970-01-01T00:01:00Z")}
    assert status["daemonEndpoints"] == {"kubeletEndpoint": {"Port": 10250}}
    ready = {c["type"]: c["status"] for c in status["conditions"]}
    assert ready["Ready"] == "True"
    assert {status for kind, status in ready.items() if kind != "Ready"} == {"False"}
