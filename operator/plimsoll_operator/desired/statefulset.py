"""The StatefulSet that runs the engine pods."""

from __future__ import annotations

from typing import Any

from plimsoll_operator import names
from plimsoll_operator.desired.metadata import fingerprint, owned
from plimsoll_operator.plan import Step
from plimsoll_operator.spec import Deployment

Json = dict[str, Any]


def build_statefulset(deployment: Deployment, step: Step, template: Json) -> Json:
    """``step`` says how many pods there may be and from which ordinal on the template holds."""
    annotations = {names.TEMPLATE_ANNOTATION: fingerprint(template)}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {**owned(deployment, deployment.name), "annotations": annotations},
        "spec": {
            "serviceName": names.headless_service(deployment.name),
            # One broken replica must not keep the others from starting.
            "podManagementPolicy": "Parallel",
            "replicas": step.replicas,
            "minReadySeconds": int(deployment.soak),
            "revisionHistoryLimit": 5,
            "selector": {"matchLabels": names.selector(deployment.name)},
            "updateStrategy": {"type": "OnDelete"}
            if step.on_delete
            else {"type": "RollingUpdate", "rollingUpdate": {"partition": step.partition}},
            "template": template,
        },
    }
