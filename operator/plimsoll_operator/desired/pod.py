"""The engine pod's template: a pure function of the spec and the operator's defaults.

Nothing of the tuner, the clock or the cluster enters here: whatever changes this template rolls
every pod.
"""

from __future__ import annotations

from typing import Any

from plimsoll_operator import names
from plimsoll_operator.runtimes import plimsoll
from plimsoll_operator.spec import Deployment, ModelSource

# Endpoints need this long to forget a stopping pod; until then it still serves.
PRESTOP_SECONDS = 5
# Left to the process after its drain to exit before the kubelet kills it.
EXIT_SECONDS = 10
# Weights of hundreds of gigabytes take long; an engine that cannot start exits by itself.
STARTUP_BUDGET_SECONDS = 3600
STARTUP_PERIOD_SECONDS = 2

NON_ROOT_ID = 65532

Json = dict[str, Any]


def build_pod_template(deployment: Deployment, default_image: str) -> Json:
    """``default_image`` is used where the spec names none."""
    template = deployment.pod_template
    metadata: Json = {"labels": {**template.labels, **names.labels(deployment.name)}}
    if template.annotations:
        metadata["annotations"] = template.annotations
    spec: Json = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": int(PRESTOP_SECONDS + deployment.drain + EXIT_SECONDS),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": NON_ROOT_ID,
            "runAsGroup": NON_ROOT_ID,
            "fsGroup": NON_ROOT_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
            **template.security_context,
        },
        "containers": [_container(deployment, default_image)],
        "volumes": [volume for volume, _ in _volumes(deployment)],
        **template.fields,
    }
    return {"metadata": metadata, "spec": spec}


def _container(deployment: Deployment, default_image: str) -> Json:
    container: Json = {
        "name": names.ENGINE_CONTAINER,
        "image": deployment.image or default_image,
        "command": list(plimsoll.COMMAND),
        "args": plimsoll.arguments(deployment),
        "env": plimsoll.environment(deployment),
        "ports": [
            {"name": "http", "containerPort": names.HTTP_PORT, "protocol": "TCP"},
            {"name": "control", "containerPort": names.CONTROL_PORT, "protocol": "TCP"},
        ],
        # The first probe that answers ends the start-up; the engine exits when it cannot start.
        "startupProbe": _probe(
            period=STARTUP_PERIOD_SECONDS,
            timeout=5,
            failures=STARTUP_BUDGET_SECONDS // STARTUP_PERIOD_SECONDS,
        ),
        # A busy engine answers late: Kubernetes' default of one second would restart it.
        "livenessProbe": _probe(period=10, timeout=10, failures=3),
        "readinessProbe": _probe(period=2, timeout=5, failures=3),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRESTOP_SECONDS}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": _resources(deployment),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            **deployment.pod_template.container_security_context,
        },
        "volumeMounts": [mount for _, mount in _volumes(deployment)],
    }
    if deployment.image_pull_policy is not None:
        container["imagePullPolicy"] = deployment.image_pull_policy
    return container


def _probe(*, period: int, timeout: int, failures: int) -> Json:
    return {
        "httpGet": {"path": "/health", "port": "http", "scheme": "HTTP"},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }


def _resources(deployment: Deployment) -> Json:
    limits, requests = dict(deployment.limits), dict(deployment.requests)
    if deployment.accelerator is not None:
        # Extended resources cannot be overcommitted: request and limit are the same.
        limits[deployment.accelerator] = deployment.tensor_parallel_size
        requests[deployment.accelerator] = deployment.tensor_parallel_size
    return {
        key: {name: str(quantity) for name, quantity in value.items()}
        for key, value in (("limits", limits), ("requests", requests))
        if value
    }


def _volumes(deployment: Deployment) -> list[tuple[Json, Json]]:
    """Volume and mount in pairs."""
    model = deployment.model
    pairs: list[tuple[Json, Json]] = [
        (
            {"name": "control", "secret": {"secretName": names.control_secret(deployment.name)}},
            {"mountPath": names.CONTROL_DIR, "readOnly": True},
        ),
        (
            {
                "name": "limits",
                # Optional: an engine without it starts at its flags.
                "configMap": {
                    "name": names.limits_config_map(deployment.name),
                    "optional": True,
                },
            },
            {"mountPath": names.LIMITS_DIR, "readOnly": True},
        ),
        ({"name": "scratch", "emptyDir": {}}, {"mountPath": plimsoll.SCRATCH_DIR}),
        ({"name": "tmp", "emptyDir": {}}, {"mountPath": plimsoll.TMP_DIR}),
    ]
    if model.cache_claim is not None:
        cache: Json = {"persistentVolumeClaim": {"claimName": model.cache_claim}}
    else:
        cache = {"emptyDir": {}}
    pairs.append(({"name": "models", **cache}, {"mountPath": names.HF_HOME}))
    if model.source is ModelSource.CLAIM:
        claim = {"claimName": model.claim, "readOnly": True}
        pairs.append(
            (
                {"name": "model", "persistentVolumeClaim": claim},
                {"mountPath": names.MODEL_DIR, "readOnly": True},
            )
        )
    if deployment.tensor_parallel_size > 1:
        # Ranks exchange tensors through shared memory; a container's default is 64 MiB.
        pairs.append(({"name": "shm", "emptyDir": {"medium": "Memory"}}, {"mountPath": "/dev/shm"}))
    return [(volume, {"name": volume["name"], **mount}) for volume, mount in pairs]
