"""How the Plimsoll engine is started: its command, flags and environment.

In: a Deployment. Out: plain lists for the container. Everything here is part of the pod template,
so nothing may come from the tuner: a tuned limit reaches the engine by SetLimits and by the limits
file, never by a flag.
"""

from __future__ import annotations

from typing import Any

from plimsoll_operator import names
from plimsoll_operator.runtimes.program import (
    SCRATCH_DIR,
    TMP_DIR,
    Program,
    Programs,
    compiled_dir,
    from_field,
    from_limit,
    from_secret,
    http_probe,
    model_path,
    offline,
    startup_failures,
    value,
    with_users,
)
from plimsoll_operator.spec import Deployment, KeyRef
from plimsoll_operator.tuning.values import Parameter

COMMAND = ("python", "-m", "plimsoll_engine")

# Every limit moves while this engine serves.
LIVE = frozenset(Parameter)

STARTUP_PERIOD_SECONDS = 2


def programs(deployment: Deployment) -> Programs:
    """The engine alone: it has the API and the control channel itself."""
    return Programs(
        Program(
            name=names.ENGINE_CONTAINER,
            image=deployment.image,
            command=COMMAND,
            arguments=tuple(arguments(deployment)),
            environment=environment(deployment),
            mounts=None,
            probes={
                # The first probe that answers ends the start-up; the engine exits when it cannot
                # start.
                "startupProbe": http_probe(
                    "/health",
                    period=STARTUP_PERIOD_SECONDS,
                    timeout=5,
                    failures=startup_failures(deployment.model, STARTUP_PERIOD_SECONDS),
                ),
                # A busy engine answers late: Kubernetes' default of one second would restart it.
                "livenessProbe": http_probe("/health", period=10, timeout=10, failures=3),
                "readinessProbe": http_probe("/health", period=2, timeout=5, failures=3),
            },
        )
    )


def worker_programs(deployment: Deployment) -> Programs:
    """The same: the engine learns from LeaderWorkerSet's variables which pod it is in, and answers
    /health once its ranks have joined."""
    return programs(deployment)


def arguments(deployment: Deployment) -> list[str]:
    """The engine's flags; spec.engine.extraArgs come last."""
    model, engine = deployment.model, deployment.engine
    flags: dict[str, object] = {
        "--model": model_path(model),
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
    if deployment.in_groups:
        flags["--group-port"] = names.GROUP_PORT
    if model.revision is not None:
        flags["--revision"] = model.revision
    return [f"{flag}={value}" for flag, value in flags.items()] + list(engine.extra_args)


def environment(deployment: Deployment) -> tuple[dict[str, Any], ...]:
    """Identity and limits by the downward API, every cache under a writable mount, and the
    user's own variables last; a name that is already set is replaced."""
    compiled = compiled_dir(deployment.model)
    variables: list[dict[str, Any]] = [
        from_field("POD_NAME", "metadata.name"),
        from_limit("PLIMSOLL_MEMORY_LIMIT", "limits.memory"),
        value("HF_HOME", names.HF_HOME),
        value("HOME", SCRATCH_DIR),
        value("XDG_CACHE_HOME", f"{SCRATCH_DIR}/cache"),
        value("TRITON_CACHE_DIR", f"{compiled}/triton"),
        value("TORCHINDUCTOR_CACHE_DIR", f"{compiled}/inductor"),
        value("TMPDIR", TMP_DIR),
        *offline(deployment.model),
    ]
    if deployment.on_cpu:
        variables.append(from_limit("OMP_NUM_THREADS", "limits.cpu"))
    if deployment.model.token is not None:
        variables.append(from_secret("HF_TOKEN", deployment.model.token))
    if deployment.api_key is not None:
        variables.append(from_secret("PLIMSOLL_API_KEY", deployment.api_key))
    if deployment.in_groups:
        token = KeyRef(names.control_secret(deployment.name), names.GROUP_TOKEN_KEY)
        variables.append(from_secret("PLIMSOLL_GROUP_TOKEN", token))
    return with_users(variables, deployment.pod_template.env)
