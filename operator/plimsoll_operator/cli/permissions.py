"""What the operator must be allowed to do (the chart's roles), and what this command needs.

Out: access reviews to ask the API server for. tests/e2e/test_cli.py holds the table against the
chart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from plimsoll_operator import names

Json = dict[str, Any]


class Scope(StrEnum):
    """Where a rule is needed."""

    SERVED = "in each namespace that is served"
    OWN = "in the operator's own namespace"
    CLUSTER = "in the cluster, by an operator of all namespaces"


@dataclass(frozen=True)
class Rule:
    """``resources`` may name a subresource, as ``llmdeployments/status``."""

    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    scope: Scope = Scope.SERVED


@dataclass(frozen=True)
class Access:
    """One verb on one resource; ``namespace`` None: of no namespace, or of all; ``name`` None: of
    every object."""

    verb: str
    group: str
    resource: str
    namespace: str | None
    name: str | None = None

    @property
    def text(self) -> str:
        group = f".{self.group}" if self.group else ""
        where = f" in {self.namespace}" if self.namespace else ""
        return f"{self.verb} {self.resource}{group}{where}"

    @property
    def attributes(self) -> Json:
        resource, _, subresource = self.resource.partition("/")
        return {
            "verb": self.verb,
            "group": self.group,
            "resource": resource,
            "subresource": subresource,
            "namespace": self.namespace or "",
            "name": self.name or "",
        }


_CHILD = ("get", "list", "watch", "create", "patch", "delete")
OPERATOR_RULES = (
    Rule(names.GROUP, (names.PLURAL,), ("get", "list", "watch")),
    Rule(names.GROUP, (f"{names.PLURAL}/status",), ("patch",)),
    Rule(names.GROUP, (f"{names.PLURAL}/finalizers",), ("update",)),
    Rule(names.GROUP, (names.PROFILE_PLURAL,), ("get", "list", "watch", "create", "patch")),
    Rule(names.GROUP, (f"{names.PROFILE_PLURAL}/status",), ("patch",)),
    Rule("", ("services", "configmaps"), _CHILD),
    # To list Secrets would be to read all of them.
    Rule("", ("secrets",), ("get", "create", "patch", "delete")),
    Rule("apps", ("statefulsets",), _CHILD),
    Rule("batch", ("jobs",), _CHILD),
    Rule("policy", ("poddisruptionbudgets",), _CHILD),
    Rule("networking.k8s.io", ("networkpolicies",), _CHILD),
    Rule("", ("pods",), ("get", "list", "watch", "delete")),
    Rule("", ("events",), ("create",)),
    # What MemoryAdvisors look at; nothing of it is written.
    Rule(names.GROUP, (names.ADVISOR_PLURAL,), ("get", "list", "watch")),
    Rule(names.GROUP, (f"{names.ADVISOR_PLURAL}/status",), ("patch",)),
    Rule("apps", ("deployments",), ("get",)),
    Rule("leaderworkerset.x-k8s.io", ("leaderworkersets",), ("get",)),
    Rule(
        "apiextensions.k8s.io",
        ("customresourcedefinitions",),
        ("get", "list", "watch"),
        Scope.CLUSTER,
    ),
    # Room for one replica more than wanted, as a rollout begins.
    Rule("", ("nodes",), ("list",), Scope.CLUSTER),
    # Which of the operator's pods works; read and written by name.
    Rule("coordination.k8s.io", ("leases",), ("create", "get", "update"), Scope.OWN),
)

# Beside those, where the chart's leaderWorkerSet is enabled: replicas of several pods.
GROUP_RULES = (
    Rule("leaderworkerset.x-k8s.io", ("leaderworkersets",), ("create", "patch", "delete")),
)
# And where its inferencePool is.
POOL_RULES = (
    Rule("inference.networking.k8s.io", ("inferencepools",), ("get", "create", "patch", "delete")),
)

# Without the first nothing is shown; without one of the others a command or two do not work.
USER_READS = Rule(names.GROUP, (names.PLURAL,), ("get", "list"))
USER_RULES = (
    USER_READS,
    Rule(names.GROUP, (names.PLURAL,), ("create", "patch", "delete")),
    Rule(names.GROUP, (names.PROFILE_PLURAL,), ("get",)),
    Rule(names.GROUP, (names.ADVISOR_PLURAL,), ("get", "list")),
)


def accesses(rules: Iterable[Rule], namespace: str | None) -> Iterator[Access]:
    """One for each verb and resource, all in ``namespace``."""
    for rule in rules:
        for resource in rule.resources:
            for verb in rule.verbs:
                yield Access(verb, rule.group, resource, namespace)


def operator_accesses(
    own: str, lease: str, served: Iterable[str], further: Iterable[Rule] = ()
) -> Iterator[Access]:
    """What an operator in namespace ``own`` needs to serve namespaces; none named: all of them.
    ``further``: what the LLMDeployments ask for beside what every one needs."""
    served, further = tuple(served), tuple(further)
    for where in served or (None,):
        yield from accesses((*_of(Scope.SERVED), *further), where)
    if not served:
        yield from accesses(_of(Scope.CLUSTER), None)
    for access in accesses(_of(Scope.OWN), own):
        yield access if access.verb == "create" else replace(access, name=lease)


def _of(scope: Scope) -> tuple[Rule, ...]:
    return tuple(rule for rule in OPERATOR_RULES if rule.scope is scope)


def review_of_self(access: Access) -> Json:
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": access.attributes},
    }


def review_of_account(access: Access, namespace: str, account: str) -> Json:
    """For a service account, with the groups that its token would have."""
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": f"system:serviceaccount:{namespace}:{account}",
            "groups": [
                "system:serviceaccounts",
                f"system:serviceaccounts:{namespace}",
                "system:authenticated",
            ],
            "resourceAttributes": access.attributes,
        },
    }
