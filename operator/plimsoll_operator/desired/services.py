"""The Service that clients call, and the headless one that names the pods."""

from __future__ import annotations

from typing import Any

from plimsoll_operator import names
from plimsoll_operator.desired.metadata import owned, serving_labels
from plimsoll_operator.spec import Deployment


def build_service(deployment: Deployment) -> dict[str, Any]:
    """Port 80 to the engines that are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owned(deployment, deployment.name),
        "spec": {
            "selector": serving_labels(deployment),
            "ports": [
                {
                    "name": "http",
                    "port": names.SERVICE_PORT,
                    "targetPort": "http",
                    "protocol": "TCP",
                }
            ],
        },
    }


def build_headless_service(deployment: Deployment) -> dict[str, Any]:
    """Governs the StatefulSet. Not-ready pods are published too: a starting engine is read."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owned(deployment, names.headless_service(deployment.name)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": names.selector(deployment.name),
            "ports": [
                {"name": "http", "port": names.HTTP_PORT, "targetPort": "http", "protocol": "TCP"},
                {
                    "name": "control",
                    "port": names.CONTROL_PORT,
                    "targetPort": "control",
                    "protocol": "TCP",
                },
            ],
        },
    }
