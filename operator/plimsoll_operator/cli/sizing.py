"""From a deployment and the command line to the settings of a byte budget.

In: a parsed LLMDeployment, a model's sizes, and the accelerator's memory as it was given. Out: a
budget with its verdict, or the sentence that says why there is none. Pure.
"""

from __future__ import annotations

import re

from plimsoll_operator.budget.devices import DEVICES
from plimsoll_operator.budget.memory import InvalidSetup, Setup, build_budget
from plimsoll_operator.budget.model import DTYPE_BYTES, ModelShape
from plimsoll_operator.budget.verdict import judge
from plimsoll_operator.cli.errors import UsageError
from plimsoll_operator.cli.plan import Sized
from plimsoll_operator.quantities import parse_quantity
from plimsoll_operator.spec import Deployment
from plimsoll_operator.tuning.profile import profile_key

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?)?", re.IGNORECASE)
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str) -> int:
    """``80GiB``, ``80Gi``, ``80GB``, ``80G`` or bytes. Raises UsageError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise UsageError(f"--gpu-memory is {text}; allowed: a size such as 80GiB, 80GB or 79.1GiB")
    number, unit, binary = match.groups()
    power = _POWERS[unit.upper()] if unit else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def find_device(
    deployment: Deployment, gpu_memory: str | None, gpu: str | None
) -> tuple[int, str] | None:
    """Bytes with their source in words; None when nothing says it."""
    if gpu_memory is not None and gpu is not None:
        raise UsageError("--gpu-memory and --gpu say the same; give one of them")
    if deployment.on_cpu:
        if gpu_memory is not None or gpu is not None:
            raise UsageError(
                "spec.accelerator.resourceName is empty: on CPU the memory is "
                "spec.resources.limits.memory, and neither --gpu nor --gpu-memory is used"
            )
        limit = parse_quantity(deployment.limits.get("memory"))
        return None if limit is None else (int(limit), "spec.resources.limits.memory")
    if gpu_memory is not None:
        return parse_size(gpu_memory), f"--gpu-memory {gpu_memory}"
    if gpu is not None:
        if gpu not in DEVICES:
            raise UsageError(
                f"--gpu is {gpu}; allowed: {', '.join(DEVICES)}; for others use --gpu-memory"
            )
        return DEVICES[gpu], f"{gpu}, as torch reports it"
    return None


def size_deployment(
    deployment: Deployment, model: ModelShape | None, device: tuple[int, str] | None
) -> tuple[Sized | None, str | None, bool]:
    """The budget, or why there is none; and whether a problem was found."""
    if model is None:
        return None, "unknown without the model's sizes: give --model-config", False
    if device is None:
        needed = (
            "spec.resources.limits.memory is not set"
            if deployment.on_cpu
            else f"give --gpu-memory, or --gpu with one of {', '.join(DEVICES)}"
        )
        return None, f"unknown without the device's memory: {needed}", False
    if deployment.pipeline_parallel_size > 1:
        return None, "not computed for stages of layers (spec.parallelism.pipeline)", False
    dtype = profile_key(deployment, "").dtype
    if dtype != "auto" and dtype not in DTYPE_BYTES:
        raise UsageError(f"--dtype is {dtype}; allowed: auto, {', '.join(DTYPE_BYTES)}")
    engine = deployment.engine
    setup = Setup(
        device=device[0],
        tensor_parallel_size=deployment.tensor_parallel_size,
        block_size=engine.block_size,
        utilization=engine.gpu_memory_utilization,
        max_model_len=deployment.ceiling,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        on_cpu=deployment.on_cpu,
        dtype=None if dtype == "auto" else dtype,
        nodes=deployment.nodes,
    )
    try:
        budget = build_budget(model, setup)
    except InvalidSetup as error:
        return None, f"cannot work: {error}; nearest: {error.nearest}", True
    verdict = judge(budget)
    return Sized(budget, verdict, device[1]), None, not verdict.fits
