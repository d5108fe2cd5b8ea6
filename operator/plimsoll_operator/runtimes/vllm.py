"""How stock vLLM is started, and the gate before it.

In: a Deployment. Out: two programs. The gate has the Service's port and the control channel; vLLM is
on the loopback address, so nobody gets past the gate. vLLM reads its memory and its batch when it
starts; what the gate moves while vLLM serves is ``LIVE``.

vLLM is the native sidecar and the gate the main container, not the other way round: a main container
starts when the sidecar's start-up probe has answered, and a stopping pod ends it first. So the gate
drains while vLLM still serves, which a plain second container, stopped at the same moment, would
not let it (vLLM aborts what runs at SIGTERM).
"""

from __future__ import annotations

import inspect

from plimsoll_operator import names
from plimsoll_operator.runtimes import vllm_launcher
from plimsoll_operator.runtimes.program import (
    SCRATCH_DIR,
    TMP_DIR,
    Json,
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
from plimsoll_operator.runtimes.vllm_flags import (
    FITTING_LENGTH,
    QUIET,
    SEVERAL_NODES_SINCE,
    Version,
    flags_for,
    read_version,
)
from plimsoll_operator.spec import Deployment, InvalidSpec
from plimsoll_operator.tuning.values import Parameter

# By its name: images before 0.11 have another entrypoint than those after it.
COMMAND = ("python3", "-c", inspect.getsource(vllm_launcher), "vllm", "serve")
GATE_COMMAND = ("python", "-m", "plimsoll_engine.gate")

LIVE = frozenset(
    {
        Parameter.MAX_MODEL_LEN,
        Parameter.MAX_NUM_SEQS,
        Parameter.LONG_PROMPT_TOKENS,
        Parameter.LONG_PROMPT_SHARE,
    }
)

GATE_MOUNTS = frozenset({"control", "limits"})
ENGINE_MOUNTS = frozenset({"scratch", "tmp", "models", "model", "shm"})

# The gate holds bodies of up to 32 MiB; at rest it has 62 MiB.
GATE_RESOURCES: Json = {
    "limits": {"memory": "1Gi"},
    "requests": {"cpu": "100m", "memory": "128Mi"},
}
STARTUP_PERIOD_SECONDS = 5

# The kubelet cannot ask the loopback address; every image of vLLM has Python.
_ASK_HEALTH = f"""\
import sys, urllib.request
try:
    urllib.request.urlopen("http://127.0.0.1:{names.UPSTREAM_PORT}/health", timeout=8)
except OSError as error:
    sys.exit(f"/health: {{error}}")
"""


def programs(deployment: Deployment) -> Programs:
    return Programs(main=_gate(deployment), before=_engine(deployment))


def worker_programs(deployment: Deployment) -> Programs:
    """vLLM without an API. It has nothing that could be probed: when a rank or its leader is lost it
    ends by itself, and the group with it."""
    return Programs(
        Program(
            name=names.ENGINE_CONTAINER,
            image=deployment.image,
            command=COMMAND,
            arguments=(*arguments(deployment, rank="$(LWS_WORKER_INDEX)"), "--headless"),
            environment=environment(deployment),
            mounts=ENGINE_MOUNTS,
            serves=False,
            probes={},
        )
    )


def _engine(deployment: Deployment) -> Program:
    return Program(
        name=names.ENGINE_CONTAINER,
        image=deployment.image,
        command=COMMAND,
        arguments=tuple(arguments(deployment)),
        environment=environment(deployment),
        mounts=ENGINE_MOUNTS,
        serves=False,
        probes={
            "startupProbe": _exec_probe(
                period=STARTUP_PERIOD_SECONDS,
                failures=startup_failures(deployment.model, STARTUP_PERIOD_SECONDS),
            ),
            "livenessProbe": _exec_probe(period=30, failures=3),
        },
    )


def _gate(deployment: Deployment) -> Program:
    flags: dict[str, object] = {
        "--upstream": f"http://127.0.0.1:{names.UPSTREAM_PORT}",
        "--max-num-seqs": deployment.engine.max_num_seqs,
        "--host": "0.0.0.0",
        "--port": names.HTTP_PORT,
        "--control-port": names.CONTROL_PORT,
        "--control-dir": names.CONTROL_DIR,
        "--limits-file": f"{names.LIMITS_DIR}/{names.LIMITS_KEY}",
        "--shutdown-timeout": f"{deployment.drain:g}",
    }
    if deployment.ceiling is not None:
        flags["--max-model-len"] = deployment.ceiling
    key = deployment.api_key
    return Program(
        name=names.GATE_CONTAINER,
        image=None,
        command=GATE_COMMAND,
        arguments=tuple(f"{flag}={setting}" for flag, setting in flags.items()),
        environment=() if key is None else (from_secret("PLIMSOLL_API_KEY", key),),
        mounts=GATE_MOUNTS,
        resources=GATE_RESOURCES,
        probes={
            "startupProbe": http_probe("/gate/health", period=1, timeout=5, failures=60),
            # The gate alone: it has nothing to be blamed for while vLLM loads anew.
            "livenessProbe": http_probe("/gate/health", period=10, timeout=10, failures=3),
            "readinessProbe": http_probe("/health", period=2, timeout=5, failures=3),
        },
    )


def arguments(deployment: Deployment, rank: str = "0") -> list[str]:
    """vLLM's flags; spec.engine.extraArgs come last. ``rank`` is the pod's in its group. Raises InvalidSpec
    for a version that knows no groups."""
    model, engine = deployment.model, deployment.engine
    version = read_version(deployment.image, deployment.runtime_version)
    flags: dict[str, object] = {
        "--served-model-name": model.served_name,
        "--tensor-parallel-size": deployment.tensor_parallel_size,
        "--gpu-memory-utilization": engine.gpu_memory_utilization,
        "--max-num-seqs": engine.max_num_seqs,
        "--max-num-batched-tokens": engine.max_num_batched_tokens,
        "--host": "127.0.0.1",
        "--port": names.UPSTREAM_PORT,
        # The gate asks every two seconds; one line each would leave no room for what matters.
        "--uvicorn-log-level": "warning",
    }
    if deployment.pipeline_parallel_size > 1:
        flags["--pipeline-parallel-size"] = deployment.pipeline_parallel_size
    if deployment.in_groups:
        flags |= _group_flags(deployment, version, rank)
    if engine.names_block_size:
        flags["--block-size"] = engine.block_size
    if deployment.ceiling is not None:
        flags["--max-model-len"] = deployment.ceiling
    if model.revision is not None:
        flags["--revision"] = model.revision
    by_version = flags_for(
        version, *([FITTING_LENGTH] if deployment.ceiling is None else []), QUIET
    )
    named = [f"{flag}={setting}" for flag, setting in flags.items()]
    return [model_path(model), *named, *by_version, *engine.extra_args]


def _group_flags(deployment: Deployment, version: Version | None, rank: str) -> dict[str, object]:
    """How ranks in several pods find each other; the kubelet puts LeaderWorkerSet's variables in."""
    if version is None or version < SEVERAL_NODES_SINCE:
        found = "unknown" if version is None else "{}.{}.{}".format(*version)
        least = "{}.{}.{}".format(*SEVERAL_NODES_SINCE)
        raise InvalidSpec(
            "spec.runtime.version",
            found,
            f"from {least} on with spec.parallelism.nodes {deployment.nodes} (before, vLLM needs Ray "
            "for more than one node)",
        )
    return {
        "--distributed-executor-backend": "mp",
        "--nnodes": deployment.nodes,
        "--node-rank": rank,
        "--master-addr": "$(LWS_LEADER_ADDRESS)",
        "--master-port": names.GROUP_PORT + 1,
    }


def environment(deployment: Deployment) -> tuple[Json, ...]:
    """Every cache under a writable mount, and the user's own variables last."""
    compiled = compiled_dir(deployment.model)
    variables = [
        value("HF_HOME", names.HF_HOME),
        value("HOME", SCRATCH_DIR),
        # torch asks who it is, and the user of the pod has no entry in the image's passwd.
        value("USER", "vllm"),
        value("XDG_CACHE_HOME", f"{SCRATCH_DIR}/cache"),
        value("VLLM_CACHE_ROOT", f"{compiled}/vllm"),
        value("VLLM_CONFIG_ROOT", f"{SCRATCH_DIR}/vllm-config"),
        value("VLLM_NO_USAGE_STATS", "1"),
        value("TRITON_CACHE_DIR", f"{compiled}/triton"),
        value("TORCHINDUCTOR_CACHE_DIR", f"{compiled}/inductor"),
        value("TMPDIR", TMP_DIR),
        *offline(deployment.model),
    ]
    if deployment.in_groups:
        # What other ranks connect to.
        variables.append(from_field("VLLM_HOST_IP", "status.podIP"))
    if deployment.on_cpu:
        variables.append(from_limit("OMP_NUM_THREADS", "limits.cpu"))
    if deployment.model.token is not None:
        variables.append(from_secret("HF_TOKEN", deployment.model.token))
    if deployment.api_key is not None:
        variables.append(from_secret("VLLM_API_KEY", deployment.api_key))
    return with_users(variables, deployment.pod_template.env)


def _exec_probe(*, period: int, failures: int) -> Json:
    return {
        "exec": {"command": ["python3", "-c", _ASK_HEALTH]},
        "periodSeconds": period,
        "timeoutSeconds": 10,
        "failureThreshold": failures,
    }
