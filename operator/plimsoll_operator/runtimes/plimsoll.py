"""How the Plimsoll engine is started: its command, flags and environment.

In: a Deployment. Out: plain lists for the container. Everything here is part of the pod template,
so nothing may come from the tuner: a tuned limit reaches the engine by SetLimits and by the limits
file, never by a flag.
"""

from __future__ import annotations

from typing import Any

from plimsoll_operator import names
from plimsoll_operator.spec import Deployment, KeyRef, ModelSource

COMMAND = ["python", "-m", "plimsoll_engine"]

SCRATCH_DIR = "/scratch"
TMP_DIR = "/tmp"


def arguments(deployment: Deployment) -> list[str]:
    """The engine's flags; spec.engine.extraArgs come last."""
    model, engine = deployment.model, deployment.engine
    path = f"/{model.location.lstrip('/')}" if model.source is ModelSource.FILE else model.location
    flags: dict[str, object] = {
        "--model": path,
        "--served-model-name": model.served_name,
        "--device": "cpu" if deployment.on_cpu else "cuda",
        "--tensor-parallel-size": deployment.tensor_parallel_size,
        "--block-size": engine.block_size,
        "--gpu-memory-utilization": engine.gpu_memory_utilization,
        "--max-model-len": "auto" if deployment.ceiling is None else deployment.ceiling,
        "--max-num-seqs": engine.max_num_seqs,
        "--max-num-batched-tokens": engine.max_num_batched_tokens,
        "--host": "0.0.0.0",
        "--port": names.HTTP_PORT,
        "--control-port": names.CONTROL_PORT,
        "--control-dir": names.CONTROL_DIR,
        "--limits-file": f"{names.LIMITS_DIR}/{names.LIMITS_KEY}",
        "--shutdown-timeout": f"{deployment.drain:g}",
    }
    if model.revision is not None:
        flags["--revision"] = model.revision
    return [f"{flag}={value}" for flag, value in flags.items()] + list(engine.extra_args)


def environment(deployment: Deployment) -> list[dict[str, Any]]:
    """Identity and limits by the downward API, every cache under a writable mount, and the
    user's own variables last; a name that is already set is replaced."""
    variables: list[dict[str, Any]] = [
        _from_field("POD_NAME", "metadata.name"),
        _from_limit("PLIMSOLL_MEMORY_LIMIT", "limits.memory"),
        _value("HF_HOME", names.HF_HOME),
        _value("HOME", SCRATCH_DIR),
        _value("XDG_CACHE_HOME", f"{SCRATCH_DIR}/cache"),
        _value("TRITON_CACHE_DIR", f"{SCRATCH_DIR}/triton"),
        _value("TORCHINDUCTOR_CACHE_DIR", f"{SCRATCH_DIR}/inductor"),
        _value("TMPDIR", TMP_DIR),
    ]
    if deployment.on_cpu:
        variables.append(_from_limit("OMP_NUM_THREADS", "limits.cpu"))
    if deployment.model.token is not None:
        variables.append(_from_secret("HF_TOKEN", deployment.model.token))
    if deployment.api_key is not None:
        variables.append(_from_secret("PLIMSOLL_API_KEY", deployment.api_key))
    own = {variable["name"]: variable for variable in variables}
    theirs = {variable["name"]: dict(variable) for variable in deployment.pod_template.env}
    return list((own | theirs).values())


def _value(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "value": value}


def _from_field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _from_limit(name: str, resource: str) -> dict[str, Any]:
    reference = {"containerName": names.ENGINE_CONTAINER, "resource": resource}
    return {"name": name, "valueFrom": {"resourceFieldRef": reference}}


def _from_secret(name: str, ref: KeyRef) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": ref.name, "key": ref.key}}}
