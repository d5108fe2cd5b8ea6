"""Asks the cluster what doctor.py judges.

In: a server. Out: :class:`Facts`. What is forbidden is None; a server that cannot be reached is an
error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from plimsoll_operator.cli import permissions
from plimsoll_operator.cli.doctor import Facts, Operator, read_kubernetes, read_operator
from plimsoll_operator.cli.errors import CommandError
from plimsoll_operator.cli.permissions import Access, Rule
from plimsoll_operator.cli.server import Forbidden, NotFound, Server
from plimsoll_operator.cli.view import View, read_view

Json = dict[str, Any]

_DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_DEPLOYMENTS = "/apis/apps/v1/deployments"
_OPERATOR = "app.kubernetes.io/name=plimsoll-operator"
_REVIEWS = "/apis/authorization.k8s.io/v1"


def gather(server: Server, definitions: Iterable[str]) -> Facts:
    kubernetes = read_kubernetes(server.get("/version"))
    operators = _operators(server)
    views = _views(server)
    operator_answers: dict[Access, bool | None] = {}
    if operators:
        operator_answers = dict(_account_answers(server, operators[0]))
    return Facts(
        kubernetes=kubernetes,
        definitions=_definitions(server, definitions),
        operators=operators,
        user=dict(_own_answers(server)),
        operator=operator_answers,
        views=views,
    )


def _definitions(server: Server, wanted: Iterable[str]) -> dict[str, Json | None] | None:
    found: dict[str, Json | None] = {}
    for name in wanted:
        try:
            found[name] = server.get(f"{_DEFINITIONS}/{name}")
        except NotFound:
            found[name] = None
        except Forbidden:
            return None
    return found


def _operators(server: Server) -> tuple[Operator, ...] | None:
    try:
        items = server.get(_DEPLOYMENTS, [("labelSelector", _OPERATOR)])["items"]
    except Forbidden:
        return None
    return tuple(read_operator(item) for item in items)


def _views(server: Server) -> tuple[View, ...] | None:
    try:
        return tuple(read_view(each) for each in server.deployments())
    except CommandError:
        # Not installed, or forbidden: both are found by another check.
        return None


def _own_answers(server: Server) -> Iterator[tuple[Access, bool | None]]:
    for access in permissions.accesses(permissions.USER_RULES, server.namespace):
        body = permissions.review_of_self(access)
        yield access, _ask(server, "selfsubjectaccessreviews", body)


def _account_answers(server: Server, operator: Operator) -> Iterator[tuple[Access, bool | None]]:
    wanted = permissions.operator_accesses(
        operator.namespace, operator.lease, operator.served, _further_rules(server)
    )
    for access in wanted:
        body = permissions.review_of_account(access, operator.namespace, operator.account)
        answer = _ask(server, "subjectaccessreviews", body)
        yield access, answer
        if answer is None:
            return


def _further_rules(server: Server) -> tuple[Rule, ...]:
    """For what only some LLMDeployments ask for."""
    try:
        specs = [each["spec"] for each in server.deployments()]
    except CommandError:
        return ()
    in_groups = any(spec.get("parallelism", {}).get("nodes", 1) > 1 for spec in specs)
    in_pools = any("inferencePool" in spec for spec in specs)
    return (
        *(permissions.GROUP_RULES if in_groups else ()),
        *(permissions.POOL_RULES if in_pools else ()),
    )


def _ask(server: Server, reviews: str, body: Json) -> bool | None:
    try:
        answer: Json = server.create(f"{_REVIEWS}/{reviews}", body)
    except Forbidden:
        return None
    return bool(answer["status"]["allowed"])
