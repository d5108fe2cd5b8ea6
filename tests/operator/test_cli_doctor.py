"""`kubectl plimsoll doctor`: what is found in the facts; and the errors of its connection."""

from __future__ import annotations

import copy
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll_operator.cli import doctor, permissions
from plimsoll_operator.cli.app import run
from plimsoll_operator.cli.definitions import own_definitions
from plimsoll_operator.cli.doctor import Facts, Finding, Level, Operator
from plimsoll_operator.cli.explain import explain
from plimsoll_operator.cli.permissions import (
    GROUP_RULES,
    USER_RULES,
    Access,
    accesses,
    operator_accesses,
)
from plimsoll_operator.cli.server import Conflict, Forbidden, NotFound, refusal, verb
from plimsoll_operator.cli.view import read_view
from plimsoll_operator.spec import TuningMode
from support.resources import NOW, llmdeployment, time

Json = dict[str, Any]
OWN = own_definitions()
VERSION = "0.1.0"


def installed(name: str) -> Json:
    body = copy.deepcopy(OWN[name])
    body["status"] = {"conditions": [{"type": "Established", "status": "True"}]}
    return body


def deployment(metrics: str = "True", generation: int = 1, **status: Any) -> Json:
    body = llmdeployment()
    conditions = (("MetricsAvailable", metrics), ("Stalled", status.pop("stalled", "False")))
    body["status"] = {
        "observedGeneration": generation,
        "conditions": [
            {
                "type": kind,
                "status": value,
                "reason": "Because",
                "message": "of this",
                "observedGeneration": 1,
                "lastTransitionTime": time(NOW),
            }
            for kind, value in conditions
        ],
    }
    return body


OPERATOR = Operator("plimsoll-system", "plimsoll", "plimsoll", "0.1.0", 1, 1)
WELL = Facts(
    kubernetes=(1, 36),
    definitions={name: installed(name) for name in OWN},
    operators=(OPERATOR,),
    user=dict.fromkeys(accesses(USER_RULES, "default"), True),
    operator=dict.fromkeys(operator_accesses("ops", "plimsoll", ()), True),
    views=(read_view(deployment()),),
)


def findings(**changes: Any) -> list[Finding]:
    return doctor.diagnose(replace(WELL, **changes), OWN, VERSION)


def test_where_all_is_well_nothing_else_is_found() -> None:
    found = findings()
    assert {finding.level for finding in found} == {Level.OK}
    text = doctor.render(found)
    assert "ok       llmdeployments.plimsoll.dev: v1alpha1, as of this version" in text
    assert "ok       operator plimsoll-system/plimsoll: 1/1 ready, version 0.1.0" in text
    assert "ok       llmd default/assistant: answered, metrics reachable" in text
    assert not doctor.found_problem(found)


def without(name: str, *path: str) -> dict[str, Json | None]:
    body = installed(name)
    schema = body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for part in path[:-1]:
        schema = schema["properties"][part]
    del schema["properties"][path[-1]]
    return {**{each: installed(each) for each in OWN}, name: body}


LLMD = "llmdeployments.plimsoll.dev"
NEWER = installed(LLMD)
NEWER["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"][
    "warp"
] = {"type": "string"}
UNSERVED = installed(LLMD)
UNSERVED["spec"]["versions"][0]["served"] = False
USER = list(accesses(USER_RULES, "default"))
OPERATORS = list(operator_accesses("ops", "plimsoll", ()))


# One thing amiss -> level and words.
@pytest.mark.parametrize(
    ("changes", "level", "says"),
    [
        ({"kubernetes": (1, 29)}, Level.PROBLEM, "1.29; at least 1.31 is needed"),
        ({"kubernetes": None}, Level.NOTE, "version not readable"),
        ({"definitions": {}}, Level.PROBLEM, f"{LLMD}: is not installed"),
        ({"definitions": None}, Level.NOTE, "definitions: not checked"),
        (
            {"definitions": {**WELL.definitions, LLMD: OWN[LLMD]}},  # type: ignore[dict-item]
            Level.PROBLEM,
            "is not Established",
        ),
        (
            {"definitions": without(LLMD, "spec", "drain")},
            Level.PROBLEM,
            "is older: it lacks spec.drain",
        ),
        (
            {"definitions": {**WELL.definitions, LLMD: NEWER}},  # type: ignore[dict-item]
            Level.NOTE,
            "is newer than this command: it has spec.warp",
        ),
        (
            {"definitions": {**WELL.definitions, LLMD: UNSERVED}},  # type: ignore[dict-item]
            Level.PROBLEM,
            "does not serve v1alpha1",
        ),
        ({"operators": ()}, Level.PROBLEM, "no Deployment has the label"),
        ({"operators": None}, Level.NOTE, "operator: not checked"),
        ({"operators": (replace(OPERATOR, ready=0),)}, Level.PROBLEM, "0/1 ready"),
        (
            {"operators": (replace(OPERATOR, version="0.2.1"),)},
            Level.PROBLEM,
            "operator 0.2.1, this command 0.1.0",
        ),
        (
            {"user": {USER[0]: False}},
            Level.PROBLEM,
            "you may not get llmdeployments.plimsoll.dev in default",
        ),
        (
            {"user": {access: access.verb != "patch" for access in USER}},
            Level.NOTE,
            "you may not patch llmdeployments",
        ),
        ({"user": {USER[0]: None}}, Level.NOTE, "your permissions: not checked"),
        (
            {"operator": {**WELL.operator, OPERATORS[5]: False}},
            Level.PROBLEM,
            "it may not get memoryprofiles.plimsoll.dev",
        ),
        ({"operator": {OPERATORS[0]: None}}, Level.NOTE, "operator's permissions: not checked"),
        ({"views": None}, Level.NOTE, "LLMDeployments: not checked"),
        (
            {"views": (read_view(deployment("False")),)},
            Level.PROBLEM,
            "metrics not readable: Because: of this",
        ),
        ({"views": (read_view(deployment("Unknown")),)}, Level.NOTE, "metrics: of this"),
        ({"views": (read_view(deployment(stalled="True")),)}, Level.PROBLEM, "Because: of this"),
        (
            {"views": (read_view(deployment(generation=0)),)},
            Level.PROBLEM,
            "has not answered its present spec",
        ),
        ({"views": (read_view(llmdeployment(drain="x")),)}, Level.PROBLEM, "spec.drain is x"),
    ],
)
def test_one_thing_amiss_is_one_finding(changes: Json, level: Level, says: str) -> None:
    found = findings(**changes)
    told = [each for each in found if each.level is not Level.OK and says in doctor.render([each])]
    assert [each.level for each in told] == [level]
    assert doctor.found_problem(found) is (level is Level.PROBLEM)


def test_patch_releases_go_together() -> None:
    found = findings(operators=(replace(OPERATOR, version="v0.1.7"),))
    assert not doctor.found_problem(found)


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("plimsoll/operator:0.1.0", "0.1.0"),
        ("registry:5000/plimsoll/operator", None),
        ("registry:5000/plimsoll/operator:v2@sha256:abc", "v2"),
    ],
)
def test_an_operator_is_read_from_its_deployment(image: str, version: str | None) -> None:
    body: Json = {
        "metadata": {"name": "plimsoll", "namespace": "ops"},
        "spec": {"template": {"spec": {"containers": [{"name": "operator", "image": image}]}}},
    }
    found = doctor.read_operator(body)
    assert found == Operator("ops", "plimsoll", "default", version, 0, 1, lease="plimsoll")


def test_an_operator_of_some_namespaces_needs_its_rights_there_alone() -> None:
    arguments = ["--leader-elect", "--lease-name=blue", "--namespace=a", "--namespace=b"]
    container = {"name": "operator", "image": "o:1", "args": arguments}
    body: Json = {
        "metadata": {"name": "plimsoll", "namespace": "ops"},
        "spec": {"template": {"spec": {"containers": [container]}}},
    }
    found = doctor.read_operator(body)
    assert (found.lease, found.served) == ("blue", ("a", "b"))
    wanted = set(operator_accesses("ops", found.lease, found.served))
    assert {access.namespace for access in wanted} == {"a", "b", "ops"}
    leases = {(a.verb, a.name) for a in wanted if a.resource == "leases"}
    assert leases == {("create", None), ("get", "blue"), ("update", "blue")}
    everywhere = set(operator_accesses("ops", "blue", ()))
    assert {access.namespace for access in everywhere} == {None, "ops"}
    further = set(operator_accesses("ops", "blue", (), GROUP_RULES)) - everywhere
    assert {access.text for access in further} == {
        f"{verb} leaderworkersets.leaderworkerset.x-k8s.io"
        for verb in ("create", "patch", "delete")
    }


def test_kubernetes_versions() -> None:
    assert doctor.read_kubernetes({"major": "1", "minor": "31+"}) == (1, 31)
    assert doctor.read_kubernetes({}) is None


def test_every_mode_is_explained() -> None:
    for mode in TuningMode:
        view = read_view(llmdeployment(tuning={"mode": mode.value}))
        assert f"tuning.mode is {mode}: " in str(explain(view, None, None, NOW))


def test_a_review_names_resource_and_subresource() -> None:
    access = Access("patch", "plimsoll.dev", "llmdeployments/status", "prod")
    body = permissions.review_of_account(access, "ops", "plimsoll")
    assert body["spec"]["user"] == "system:serviceaccount:ops:plimsoll"
    assert body["spec"]["resourceAttributes"] == {
        "verb": "patch",
        "group": "plimsoll.dev",
        "resource": "llmdeployments",
        "subresource": "status",
        "namespace": "prod",
        "name": "",
    }


# The connection's errors


def status_body(message: str) -> bytes:
    return json.dumps({"kind": "Status", "message": message}).encode()


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        (403, Forbidden, "you may not patch llmdeployments in namespace prod: no"),
        (404, NotFound, "no"),
        (409, Conflict, "somebody changed it"),
    ],
)
def test_a_refusal_says_what_was_asked(code: int, kind: type, says: str) -> None:
    path = "/apis/plimsoll.dev/v1alpha1/namespaces/prod/llmdeployments/chat"
    error = refusal("PATCH", path, code, status_body("no"))
    assert isinstance(error, kind)
    assert says in str(error)
    assert error.exit_code == 1


def test_other_refusals_are_told_in_the_servers_words() -> None:
    assert "credentials (401)" in str(refusal("GET", "/api/v1/pods", 401, b""))
    assert "answered 500: <html>" in str(refusal("GET", "/api/v1/pods", 500, b"<html>"))


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("GET", "/apis/plimsoll.dev/v1alpha1/llmdeployments", "list llmdeployments"),
        ("GET", "/api/v1/namespaces/a/pods", "list pods in namespace a"),
        ("GET", "/api/v1/namespaces/a/pods/b", "get pods in namespace a"),
        (
            "POST",
            "/apis/authorization.k8s.io/v1/subjectaccessreviews",
            "create subjectaccessreviews",
        ),
    ],
)
def test_a_request_in_rbac_words(method: str, path: str, words: str) -> None:
    assert verb(method, path) == words


def kubeconfig(folder: Path, server: str) -> str:
    body = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(body))
    return str(path)


COMMANDS = (
    ["top", "--once"],
    ["explain", "a"],
    ["history", "a"],
    ["pin", "a"],
    ["hold", "a"],
    ["resume", "a"],
    ["doctor"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_server_that_is_not_there_is_status_1(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        code = run([*command, "--kubeconfig", kubeconfig(tmp_path, url)])
    assert code == 1
    assert f"error: the API server {url} cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["top", "--kubeconfig", "/nowhere/config"], "no usable kubeconfig (/nowhere/config)"),
        (["top", "-A", "-n", "a"], "exclude each other"),
        (["resume", "a", "--mode", "Fast"], "--mode is Fast; allowed: Off, Advise"),
        (["explain"], "Missing argument"),
        (["dance"], "No such command"),
        (["top", "--watch", "0"], "--watch"),
    ],
)
def test_a_bad_call_is_status_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert says in capsys.readouterr().err


def test_a_context_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = kubeconfig(tmp_path, "http://127.0.0.1:1")
    assert run(["top", "--kubeconfig", path, "--context", "there"]) == 2
    assert "there" in capsys.readouterr().err
