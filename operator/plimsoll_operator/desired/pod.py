"""The engine pod's template: a pure function of the spec and the operator's defaults.

Nothing of the tuner, the clock or the cluster enters here: whatever changes this template rolls
every pod.
"""

from __future__ import annotations

from typing import Any

from plimsoll_operator import names, runtimes
from plimsoll_operator.desired.merge import merged
from plimsoll_operator.runtimes.program import SCRATCH_DIR, TMP_DIR, Program, Programs
from plimsoll_operator.spec import Cache, Deployment, ModelSource, RuntimeName

# Endpoints need this long to forget a stopping pod; until then it still serves.
PRESTOP_SECONDS = 5
# Left to the process after its drain to exit before the kubelet kills it.
EXIT_SECONDS = 10

NON_ROOT_ID = 65532

Json = dict[str, Any]


def build_pod_template(deployment: Deployment, default_image: str) -> Json:
    """``default_image`` is this project's, for what names none of its own. Of a pod that serves."""
    return _template(deployment, runtimes.programs(deployment), default_image)


def build_worker_template(deployment: Deployment, default_image: str) -> Json:
    """Of a group's other pods."""
    return _template(deployment, runtimes.worker_programs(deployment), default_image)


def _template(deployment: Deployment, programs: Programs, default_image: str) -> Json:
    template = deployment.pod_template
    metadata: Json = {"labels": {**template.labels, **names.labels(deployment.name)}}
    if template.annotations:
        metadata["annotations"] = template.annotations
    spec: Json = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": int(PRESTOP_SECONDS + deployment.drain + EXIT_SECONDS),
        "securityContext": pod_security_context(deployment),
        "containers": [_container(deployment, programs.main, default_image)],
        "volumes": [volume for volume, _ in _volumes(deployment)],
        **template.fields,
    }
    if programs.before is not None:
        before = _container(deployment, programs.before, default_image)
        spec["initContainers"] = [{**before, "restartPolicy": "Always"}]
    return {"metadata": metadata, "spec": merged(spec, template.patch)}


def pod_security_context(deployment: Deployment) -> Json:
    return {
        "runAsNonRoot": True,
        "runAsUser": NON_ROOT_ID,
        "runAsGroup": NON_ROOT_ID,
        "fsGroup": NON_ROOT_ID,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
        **deployment.pod_template.security_context,
    }


def restricted(users: Json | None = None) -> Json:
    """A container's security context, with the user's own over it."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        **(users or {}),
    }


def _container(deployment: Deployment, program: Program, default_image: str) -> Json:
    mounts = [mount for _, mount in _volumes(deployment)] + _compiled_mount(deployment)
    own = program.resources
    container: Json = {
        "name": program.name,
        "image": program.image or default_image,
        "command": list(program.command),
        "args": list(program.arguments),
        "env": list(program.environment),
        **program.probes,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": _resources(deployment) if own is None else own,
        # What the user allows is for the engine.
        "securityContext": restricted(
            deployment.pod_template.container_security_context if own is None else {}
        ),
        "volumeMounts": [
            mount for mount in mounts if program.mounts is None or mount["name"] in program.mounts
        ],
    }
    if program.serves:
        container["ports"] = [
            {"name": "http", "containerPort": names.HTTP_PORT, "protocol": "TCP"},
            {"name": "control", "containerPort": names.CONTROL_PORT, "protocol": "TCP"},
        ]
        container["lifecycle"] = {"preStop": {"sleep": {"seconds": PRESTOP_SECONDS}}}
    if deployment.image_pull_policy is not None:
        container["imagePullPolicy"] = deployment.image_pull_policy
    return container


def _resources(deployment: Deployment) -> Json:
    limits, requests = dict(deployment.limits), dict(deployment.requests)
    if deployment.accelerator is not None:
        # Extended resources cannot be overcommitted: request and limit are the same.
        limits[deployment.accelerator] = deployment.ranks_per_pod
        requests[deployment.accelerator] = deployment.ranks_per_pod
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
        ({"name": "scratch", "emptyDir": {}}, {"mountPath": SCRATCH_DIR}),
        ({"name": "tmp", "emptyDir": {}}, {"mountPath": TMP_DIR}),
    ]
    weights: Json = {"mountPath": names.HF_HOME}
    if model.cache.prefetch:
        weights["readOnly"] = True
    pairs.append(({"name": "models", **cache_volume(model.cache)}, weights))
    if model.image is not None:
        pairs.append(
            (
                {"name": "model", "image": {"reference": model.image}},
                {"mountPath": names.MODEL_DIR, "readOnly": True},
            )
        )
    if model.source is ModelSource.CLAIM:
        claim = {"claimName": model.claim, "readOnly": True}
        pairs.append(
            (
                {"name": "model", "persistentVolumeClaim": claim},
                {"mountPath": names.MODEL_DIR, "readOnly": True},
            )
        )
    size, several = deployment.shared_memory, deployment.ranks_per_pod > 1
    if size is not None or several or deployment.runtime is RuntimeName.VLLM:
        # Ranks exchange tensors through shared memory, and vLLM's processes their requests (160 MiB
        # for one worker in 0.32); a container's default is 64 MiB.
        medium: Json = {"medium": "Memory"}
        if size is not None:
            medium["sizeLimit"] = size
        pairs.append(({"name": "shm", "emptyDir": medium}, {"mountPath": "/dev/shm"}))
    return [(volume, {"name": volume["name"], **mount}) for volume, mount in pairs]


def cache_volume(cache: Cache) -> Json:
    """Where ``HF_HOME`` is; without a cache a folder of the pod."""
    if cache.claim is not None:
        return {"persistentVolumeClaim": {"claimName": cache.claim}}
    if cache.host_path is not None:
        return {"hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}}
    return {"emptyDir": {}}


def _compiled_mount(deployment: Deployment) -> list[Json]:
    """A folder of the cache's volume, writable even where the weights are not."""
    cache = deployment.model.cache
    if not cache.compiled:
        return []
    return [
        {
            "name": "models",
            "mountPath": names.COMPILED_DIR,
            "subPath": names.COMPILED_FOLDER,
        }
    ]
