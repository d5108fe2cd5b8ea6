"""The PodDisruptionBudget: a drained node takes one replica at a time.

Where a replica is a group of pods, the loss of one takes the others with it; they count as unavailable until
the group is back, so no pod of a second group may be evicted meanwhile.
"""

from __future__ import annotations

from typing import Any

from plimsoll_operator import names
from plimsoll_operator.desired.metadata import owned
from plimsoll_operator.spec import Deployment


def build_disruption_budget(deployment: Deployment) -> dict[str, Any] | None:
    """None for fewer than two replicas, where it could only forbid or allow everything.
    Broken pods may always be evicted, so that they never hold up a drain."""
    if deployment.replicas < 2:
        return None
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": owned(deployment, deployment.name),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": names.selector(deployment.name)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
