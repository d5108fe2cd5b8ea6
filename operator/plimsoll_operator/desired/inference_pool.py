"""The InferencePool of the Gateway API's inference extension: a gateway routes to the engines by it.

The endpoint picker that it names reads the pods' metrics, which have vLLM's names.
"""

from __future__ import annotations

from typing import Any

from plimsoll_operator import names
from plimsoll_operator.desired.metadata import owned, serving_labels
from plimsoll_operator.spec import Deployment


def build_inference_pool(deployment: Deployment) -> dict[str, Any] | None:
    picker = deployment.endpoint_picker
    if picker is None:
        return None
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": owned(deployment, deployment.name),
        "spec": {
            "selector": {"matchLabels": serving_labels(deployment)},
            "targetPorts": [{"number": names.HTTP_PORT}],
            "endpointPickerRef": {
                "name": picker.name,
                "port": {"number": picker.port},
                "failureMode": picker.failure_mode,
            },
        },
    }
