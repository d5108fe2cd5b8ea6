"""The ConfigMap with the limits in force, which an engine reads once when it starts.

So a restarted container comes back at the tuned line, and the pod template never changes for it.
"""

from __future__ import annotations

from typing import Any

from plimsoll_operator import names
from plimsoll_operator.desired.metadata import owned
from plimsoll_operator.spec import Deployment
from plimsoll_operator.tuning.record import limits_document
from plimsoll_operator.tuning.values import Limits


def build_limits(deployment: Deployment, limits: Limits, revision: int) -> dict[str, Any]:
    """Limits that are None are left out: the engine's flag holds."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": owned(deployment, names.limits_config_map(deployment.name)),
        "data": {names.LIMITS_KEY: limits_document(revision, limits)},
    }
