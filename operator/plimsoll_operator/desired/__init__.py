"""The children that one LLMDeployment should have; one pure builder per kind.

In: the spec, the plan's step, credentials and limits as values. Out: objects to apply, and None
where a child must not exist. Knows neither what the cluster has nor how things are written.
"""

from __future__ import annotations

from typing import Any

from plimsoll_operator import names
from plimsoll_operator.desired.control_secret import build_control_secret
from plimsoll_operator.desired.disruption_budget import build_disruption_budget
from plimsoll_operator.desired.limits import build_limits
from plimsoll_operator.desired.network_policy import build_network_policy
from plimsoll_operator.desired.services import build_headless_service, build_service
from plimsoll_operator.desired.statefulset import build_statefulset
from plimsoll_operator.observed import Credentials
from plimsoll_operator.plan import Step
from plimsoll_operator.spec import Deployment
from plimsoll_operator.tuning.values import Limits

Json = dict[str, Any]


def build_children(
    deployment: Deployment,
    *,
    step: Step,
    template: Json,
    credentials: Credentials,
    limits: Limits,
    revision: int,
    operator_namespace: str | None = None,
) -> dict[tuple[str, str], Json | None]:
    """By kind and name, in the order in which they are applied: what a pod mounts comes before
    the StatefulSet that makes the pod. ``operator_namespace`` is where the operator's own pods are
    (None: it has none, or no NetworkPolicy is wanted)."""
    name = deployment.name
    return {
        ("Secret", names.control_secret(name)): build_control_secret(deployment, credentials),
        ("ConfigMap", names.limits_config_map(name)): build_limits(deployment, limits, revision),
        ("Service", names.headless_service(name)): build_headless_service(deployment),
        ("Service", name): build_service(deployment),
        ("PodDisruptionBudget", name): build_disruption_budget(deployment),
        ("NetworkPolicy", name): build_network_policy(deployment, operator_namespace),
        ("StatefulSet", name): build_statefulset(deployment, step, template),
    }
