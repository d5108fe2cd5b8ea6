"""The NetworkPolicy: the OpenAI API is for everybody, the control channel for the operator alone.

TLS and token guard the channel too; this keeps others from even knocking. The pods of a group also
exchange tensors, in the clear and on ports that nobody can name beforehand: there everything but the API
is for the group's own pods.
"""

from __future__ import annotations

from typing import Any

from plimsoll_operator import names
from plimsoll_operator.desired.metadata import owned
from plimsoll_operator.spec import Deployment

# All but the control port, so that a sidecar of the user's is reached as without the policy. The
# API's port by itself too, for network plugins that know no ranges.
_OPEN = [
    {"port": names.HTTP_PORT, "protocol": "TCP"},
    {"port": 1, "endPort": names.CONTROL_PORT - 1, "protocol": "TCP"},
    {"port": names.CONTROL_PORT + 1, "endPort": 65535, "protocol": "TCP"},
    {"port": 1, "endPort": 65535, "protocol": "UDP"},
]


def _open(deployment: Deployment) -> list[dict[str, Any]]:
    if not deployment.in_groups:
        return [{"ports": _OPEN}]
    members = {"podSelector": {"matchLabels": names.selector(deployment.name)}}
    return [{"ports": [{"port": names.HTTP_PORT, "protocol": "TCP"}]}, {"from": [members]}]


def build_network_policy(
    deployment: Deployment, operator_namespace: str | None
) -> dict[str, Any] | None:
    """None where the operator does not run in the cluster, and so is no pod to be named."""
    if operator_namespace is None:
        return None
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": operator_namespace}},
        "podSelector": {"matchLabels": names.OPERATOR_SELECTOR},
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": owned(deployment, deployment.name),
        "spec": {
            "podSelector": {"matchLabels": names.selector(deployment.name)},
            "policyTypes": ["Ingress"],
            "ingress": [
                *_open(deployment),
                {"from": [operator], "ports": [{"port": names.CONTROL_PORT, "protocol": "TCP"}]},
            ],
        },
    }
