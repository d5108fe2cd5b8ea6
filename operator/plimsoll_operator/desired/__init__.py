"""The children that one LLMDeployment should have; one pure builder per kind.

In: the spec, the plan's step, credentials and limits as values. Out: objects to apply, and None
where a child must not exist. Knows neither what the cluster has nor how things are written.
"""

from __future__ import annotations

from typing import Any

from plimsoll_operator import names
from plimsoll_operator.desired.control_secret import build_control_secret
from plimsoll_operator.desired.disruption_budget import build_disruption_budget
from plimsoll_operator.desired.inference_pool import build_inference_pool
from plimsoll_operator.desired.leader_worker_set import (
    build_group_template,
    build_leader_worker_set,
)
from plimsoll_operator.desired.limits import build_limits
from plimsoll_operator.desired.network_policy import build_network_policy
from plimsoll_operator.desired.pod import build_pod_template
from plimsoll_operator.desired.services import build_headless_service, build_service
from plimsoll_operator.desired.statefulset import build_statefulset
from plimsoll_operator.observed import Credentials
from plimsoll_operator.plan import Step
from plimsoll_operator.spec import Deployment
from plimsoll_operator.tuning.values import Limits

Json = dict[str, Any]

# Kinds of which one makes the pods.
WORKLOADS = ("StatefulSet", "LeaderWorkerSet")


def build_template(deployment: Deployment, default_image: str) -> Json:
    """Of one replica: a pod, or a group of them. ``default_image`` is this project's."""
    if deployment.in_groups:
        return build_group_template(deployment, default_image)
    return build_pod_template(deployment, default_image)


def template_of(workload: Json) -> Json:
    """Where the child that makes the pods has it."""
    spec: Json = workload["spec"]
    grouped = workload["kind"] == "LeaderWorkerSet"
    template: Json = spec["leaderWorkerTemplate" if grouped else "template"]
    return template


def workload_key(deployment: Deployment) -> tuple[str, str]:
    """The child that makes the pods."""
    if deployment.in_groups:
        return ("LeaderWorkerSet", names.group(deployment.name))
    return ("StatefulSet", deployment.name)


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
        ("InferencePool", name): build_inference_pool(deployment),
        **_workload(deployment, step, template),
    }


def _workload(
    deployment: Deployment, step: Step, template: Json
) -> dict[tuple[str, str], Json | None]:
    """The one that must not exist goes first: its accelerators are the other's."""
    single = ("StatefulSet", deployment.name)
    groups = ("LeaderWorkerSet", names.group(deployment.name))
    if deployment.in_groups:
        return {single: None, groups: build_leader_worker_set(deployment, step, template)}
    return {groups: None, single: build_statefulset(deployment, step, template)}
