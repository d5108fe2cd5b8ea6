"""`doctor`: is everything there that Plimsoll needs, and does it fit together?

In: what the cluster answered, as values. Out: findings, each with what to do. Pure; what may not be
read is not checked, and said so: it is neither well nor a problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from plimsoll_operator import names
from plimsoll_operator.cli.definitions import missing_fields, schema_of
from plimsoll_operator.cli.permissions import USER_READS, Access, accesses
from plimsoll_operator.cli.view import View

Json = dict[str, Any]

# The chart's kubeVersion.
LEAST_KUBERNETES = (1, 31)
_SHOWN = 4


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    level: Level
    subject: str
    message: str
    remedy: str = ""


@dataclass(frozen=True)
class Operator:
    """One installed operator; ``version`` is its image's tag, ``served`` the namespaces that it is
    for (none named: all)."""

    namespace: str
    name: str
    account: str
    version: str | None
    ready: int
    replicas: int
    lease: str = ""
    served: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """None: it may not be read. ``allowed`` has the answers to access reviews (None: unanswered)."""

    kubernetes: tuple[int, int] | None
    definitions: Mapping[str, Json | None] | None
    operators: tuple[Operator, ...] | None
    user: Mapping[Access, bool | None]
    operator: Mapping[Access, bool | None]
    views: tuple[View, ...] | None


def diagnose(facts: Facts, own: Mapping[str, Json], version: str) -> list[Finding]:
    """``own`` are the definitions of this command's version."""
    return [
        check_kubernetes(facts.kubernetes),
        *check_definitions(facts.definitions, own),
        *check_operators(facts.operators, version),
        check_user(facts.user),
        *check_operator_access(facts.operator, facts.operators),
        *check_deployments(facts.views),
    ]


def check_kubernetes(version: tuple[int, int] | None) -> Finding:
    least = ".".join(map(str, LEAST_KUBERNETES))
    if version is None:
        return Finding(
            Level.NOTE, "Kubernetes", f"version not readable; at least {least} is needed"
        )
    shown = ".".join(map(str, version))
    if version < LEAST_KUBERNETES:
        return Finding(Level.PROBLEM, "Kubernetes", f"{shown}; at least {least} is needed")
    return Finding(Level.OK, "Kubernetes", shown)


def check_definitions(
    found: Mapping[str, Json | None] | None, own: Mapping[str, Json]
) -> list[Finding]:
    if found is None:
        return [Finding(Level.NOTE, "definitions", "not checked: you may not read them")]
    return [_check_definition(name, found.get(name), own[name]) for name in sorted(own)]


def _check_definition(name: str, found: Json | None, own: Json) -> Finding:
    install = "helm upgrade --install plimsoll charts/plimsoll -n plimsoll-system"
    if found is None:
        return Finding(Level.PROBLEM, name, "is not installed", install)
    conditions = found.get("status", {}).get("conditions", [])
    if not any(c["type"] == "Established" and c["status"] == "True" for c in conditions):
        return Finding(Level.PROBLEM, name, "is not Established", f"kubectl describe crd {name}")
    theirs, ours = schema_of(found, names.VERSION), schema_of(own, names.VERSION)
    assert ours is not None
    if theirs is None:
        return Finding(Level.PROBLEM, name, f"does not serve {names.VERSION}", install)
    if lacking := missing_fields(ours, theirs):
        return Finding(Level.PROBLEM, name, f"is older: it lacks {_few(lacking)}", install)
    if unknown := missing_fields(theirs, ours):
        message = f"is newer than this command: it has {_few(unknown)} as well"
        return Finding(Level.NOTE, name, message, "upgrade kubectl-plimsoll")
    return Finding(Level.OK, name, f"{names.VERSION}, as of this version")


def check_operators(operators: tuple[Operator, ...] | None, version: str) -> list[Finding]:
    if operators is None:
        return [Finding(Level.NOTE, "operator", "not checked: you may not list deployments")]
    if not operators:
        return [
            Finding(
                Level.PROBLEM,
                "operator",
                "no Deployment has the label app.kubernetes.io/name=plimsoll-operator",
                "helm install plimsoll charts/plimsoll -n plimsoll-system --create-namespace",
            )
        ]
    findings = [_check_operator(each) for each in operators]
    for each in operators:
        if each.version is not None and _release(each.version) != _release(version):
            findings.append(
                Finding(
                    Level.PROBLEM,
                    "versions",
                    f"operator {each.version}, this command {version}",
                    "use the kubectl-plimsoll of the operator's version",
                )
            )
    return findings


def _check_operator(operator: Operator) -> Finding:
    name = f"operator {operator.namespace}/{operator.name}"
    state = f"{operator.ready}/{operator.replicas} ready, version {operator.version or 'unknown'}"
    if operator.ready > 0:
        return Finding(Level.OK, name, state)
    look = f"kubectl -n {operator.namespace} describe deployment {operator.name}"
    return Finding(Level.PROBLEM, name, state, look)


def check_user(answers: Mapping[Access, bool | None]) -> Finding:
    denied = [access for access, allowed in answers.items() if allowed is False]
    unknown = [access for access, allowed in answers.items() if allowed is None]
    reads = {(access.verb, access.resource) for access in accesses((USER_READS,), None)}
    if any((access.verb, access.resource) in reads for access in denied):
        return Finding(
            Level.PROBLEM, "your permissions", f"you may not {_few([a.text for a in denied])}"
        )
    if denied:
        return Finding(
            Level.NOTE, "your permissions", f"you may not {_few([a.text for a in denied])}"
        )
    if unknown:
        return Finding(Level.NOTE, "your permissions", "not checked: the server did not answer")
    return Finding(Level.OK, "your permissions", "enough for every command")


def check_operator_access(
    answers: Mapping[Access, bool | None], operators: tuple[Operator, ...] | None
) -> list[Finding]:
    if not operators:
        return []
    subject = "operator's permissions"
    denied = [access.text for access, allowed in answers.items() if allowed is False]
    if denied:
        remedy = "rbac.create=true in the chart, or bind these"
        return [Finding(Level.PROBLEM, subject, f"it may not {_few(denied)}", remedy)]
    if not answers or None in answers.values():
        message = "not checked: you may not create subjectaccessreviews"
        return [Finding(Level.NOTE, subject, message)]
    return [Finding(Level.OK, subject, f"all {len(answers)} that it needs")]


def check_deployments(views: tuple[View, ...] | None) -> list[Finding]:
    if views is None:
        return [Finding(Level.NOTE, "LLMDeployments", "not checked: they cannot be listed")]
    if not views:
        return [Finding(Level.OK, "LLMDeployments", "there is none")]
    return [_check_deployment(view) for view in views]


def _check_deployment(view: View) -> Finding:
    subject = f"llmd {view.namespace}/{view.name}"
    look = f"kubectl plimsoll explain {view.name} -n {view.namespace}"
    if view.invalid is not None:
        return Finding(Level.PROBLEM, subject, view.invalid)
    metrics, stalled = view.conditions.get("MetricsAvailable"), view.conditions.get("Stalled")
    if stalled is not None and stalled.status == "True":
        return Finding(Level.PROBLEM, subject, f"{stalled.reason}: {stalled.message}", look)
    if metrics is None or not view.answered:
        message = "the operator has not answered its present spec"
        return Finding(Level.PROBLEM, subject, message, "is the operator running? see above")
    if metrics.status == "False":
        message = f"metrics not readable: {metrics.reason}: {metrics.message}"
        return Finding(Level.PROBLEM, subject, message, look)
    if metrics.status == "Unknown":
        return Finding(Level.NOTE, subject, f"metrics: {metrics.message}")
    return Finding(Level.OK, subject, "answered, metrics reachable")


def _release(version: str) -> tuple[str, ...]:
    """Patch releases go together."""
    return tuple(version.removeprefix("v").split(".")[:2])


def _few(items: Iterable[str]) -> str:
    items = list(items)
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


def found_problem(findings: Iterable[Finding]) -> bool:
    return any(finding.level is Level.PROBLEM for finding in findings)


def render(findings: Iterable[Finding]) -> str:
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<8} {finding.subject}: {finding.message}")
        if finding.remedy:
            lines.append(f"         -> {finding.remedy}")
    return "\n".join(lines)


def read_operator(deployment: Json) -> Operator:
    """From a Deployment of the chart."""
    metadata, spec = deployment["metadata"], deployment["spec"]
    pod = spec["template"]["spec"]
    containers = pod["containers"]
    container = next((c for c in containers if c["name"] == "operator"), containers[0])
    tag = container["image"].rpartition("/")[2].partition("@")[0].partition(":")[2]
    leases = _flags(container, "--lease-name")
    return Operator(
        namespace=metadata["namespace"],
        name=metadata["name"],
        account=pod.get("serviceAccountName", "default"),
        version=tag or None,
        ready=deployment.get("status", {}).get("readyReplicas", 0),
        replicas=spec.get("replicas", 1),
        lease=leases[-1] if leases else metadata["name"],
        served=_flags(container, "--namespace"),
    )


def _flags(container: Json, flag: str) -> tuple[str, ...]:
    """The values of ``flag``, written as the chart writes it: ``--flag=value``."""
    arguments = container.get("args", ())
    return tuple(a.partition("=")[2] for a in arguments if a.startswith(f"{flag}="))


def read_kubernetes(version: Json) -> tuple[int, int] | None:
    """From /version; a minor such as 31+ is 31."""
    try:
        return int(version["major"]), int(str(version["minor"]).rstrip("+"))
    except (KeyError, ValueError):
        return None
