"""What the operator must be allowed to do (the chart's ClusterRole), and what this command needs.

Out: access reviews to ask the API server for. tests/e2e/test_cli.py holds the table against the
chart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from plimsoll_operator import names

Json = dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """``resources`` may name a subresource, as ``llmdeployments/status``."""

    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    cluster_scoped: bool = False


@dataclass(frozen=True)
class Access:
    """One verb on one resource; ``namespace`` None: of no namespace, or of all."""

    verb: str
    group: str
    resource: str
    namespace: str | None

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
        }


OPERATOR_RULES = (
    Rule(names.GROUP, (names.PLURAL,), ("get", "list", "watch")),
    Rule(names.GROUP, (f"{names.PLURAL}/status",), ("patch",)),
    Rule(names.GROUP, (f"{names.PLURAL}/finalizers",), ("update",)),
    Rule(names.GROUP, (names.PROFILE_PLURAL,), ("get", "create", "patch")),
    Rule(names.GROUP, (f"{names.PROFILE_PLURAL}/status",), ("patch",)),
    Rule("", ("services", "configmaps", "secrets"), ("get", "create", "patch", "delete")),
    Rule("apps", ("statefulsets",), ("get", "list", "watch", "create", "patch", "delete")),
    Rule("policy", ("poddisruptionbudgets",), ("get", "create", "patch", "delete")),
    Rule("", ("pods",), ("get", "list", "watch", "delete")),
    Rule("", ("events",), ("create",)),
    Rule(
        "apiextensions.k8s.io",
        ("customresourcedefinitions",),
        ("get", "list", "watch"),
        cluster_scoped=True,
    ),
)

# Without the first nothing is shown; without one of the others a command or two do not work.
USER_READS = Rule(names.GROUP, (names.PLURAL,), ("get", "list"))
USER_RULES = (
    USER_READS,
    Rule(names.GROUP, (names.PLURAL,), ("create", "patch", "delete")),
    Rule(names.GROUP, (names.PROFILE_PLURAL,), ("get",)),
)


def accesses(rules: tuple[Rule, ...], namespace: str | None) -> Iterator[Access]:
    for rule in rules:
        for resource in rule.resources:
            for verb in rule.verbs:
                where = None if rule.cluster_scoped else namespace
                yield Access(verb, rule.group, resource, where)


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
