"""Metadata that every child shares: name, namespace, labels and the owner."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from plimsoll_operator import names
from plimsoll_operator.spec import Deployment


def owned(deployment: Deployment, name: str) -> dict[str, Any]:
    """Deletion goes through the owner reference: there are no finalizers."""
    return {
        "name": name,
        "namespace": deployment.namespace,
        "labels": names.labels(deployment.name),
        "ownerReferences": [
            {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": deployment.name,
                "uid": deployment.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }


def serving_labels(deployment: Deployment) -> dict[str, str]:
    """Labels that pick the pods with an API: all of them, or the leaders of groups."""
    own = names.selector(deployment.name)
    return {**own, names.ROLE_LABEL: names.LEADER_ROLE} if deployment.in_groups else own


def fingerprint(body: dict[str, Any]) -> str:
    """Names one wanted object; a field that was removed from it changes the name too."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]
