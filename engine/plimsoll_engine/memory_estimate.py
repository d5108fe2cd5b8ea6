"""Whether the weights can fit at all, told from sizes alone, before anything is read.

In: configurations and what the device has. Out: nothing, or an EngineFailure: ModelTooLarge with the
figure that would work, GPUBusyAtStart where it is others that are in the way. What a step really takes is measured later; here it is estimated from above.
"""

from __future__ import annotations

import math

import torch

from plimsoll_engine.config import EngineConfig
from plimsoll_engine.models.backends import ServedModel, allowed_parallel_sizes, weight_bytes
from plimsoll_engine.termination import EngineFailure, FailureClass, Phase

_MIB = 1 << 20
# What libraries and buffers come to take after the first steps, beside what is in use at load.
_RUNTIME_GROWTH = 128 * _MIB
# The most that a process takes of a GPU before it loads anything: context, libraries, NCCL's buffers.
_CONTEXT = 2 * 1024 * _MIB
# Length that the suggested memory has room for when --max-model-len leaves it open.
_DEFAULT_LENGTH = 2048


def held_elsewhere(device_kind: str, used: int) -> int:
    """Bytes of a GPU that others hold, by what is in use before anything is loaded. On the CPU nobody else
    is in the container."""
    return 0 if device_kind == "cpu" else max(0, used - _CONTEXT)


def busy_at_load(elsewhere: int, total: int, message: str) -> EngineFailure:
    return EngineFailure(
        FailureClass.DEVICE_BUSY_AT_START,
        Phase.LOAD,
        f"others hold {elsewhere} bytes of the device's {total}: {message}",
        {"held_elsewhere_bytes": elsewhere, "total_bytes": total},
    )


def check_weights_fit(
    config: EngineConfig,
    model: ServedModel,
    dtype: torch.dtype,
    device_kind: str,
    size: int,
    *,
    local_size: int,
    total: int,
    used: int,
) -> None:
    """``total`` and ``used`` are one rank's device's; on the CPU the ``local_size`` ranks of a pod
    share one ``total``."""
    shards = [weight_bytes(model, dtype, rank, size, device_kind) for rank in range(size)]
    on_cpu = device_kind == "cpu"
    weights = sum(shards) * local_size // size if on_cpu else max(shards)
    in_use = used * local_size if on_cpu else used
    if weights + in_use <= total:
        return
    elsewhere = held_elsewhere(device_kind, used)
    if weights + in_use - elsewhere <= total:
        raise busy_at_load(elsewhere, total, f"the weights take {weights} bytes")
    figures: dict[str, int | float | str] = {
        "weights_bytes": weights,
        "in_use_bytes": in_use,
        "total_bytes": total,
    }
    suggestion: dict[str, str | int | float] | None = None
    if on_cpu:
        value = suggested_memory(config, model, dtype, size, weights=weights, in_use=in_use)
        suggestion = {"flag": "memory", "value": value}
        advice = f"a limit of {value} bytes would do"
    else:
        larger = _fitting_size(model, dtype, total - used, above=size)
        advice = "no size divides it so"
        if larger is not None:
            suggestion = {"flag": "--tensor-parallel-size", "value": larger}
            advice = f"--tensor-parallel-size {larger} would do"
    raise EngineFailure(
        FailureClass.MODEL_TOO_LARGE,
        Phase.LOAD,
        f"the weights take {weights} bytes as {str(dtype).removeprefix('torch.')}, the engine "
        f"itself {in_use}, and there are {total}: {advice}",
        figures,
        suggestion,
    )


def suggested_memory(
    config: EngineConfig,
    model: ServedModel,
    dtype: torch.dtype,
    size: int,
    *,
    weights: int,
    in_use: int,
) -> int:
    """Bytes with which the model loads, profiles and has KV for one sequence; in whole 64 MiB."""
    item = dtype.itemsize
    length = config.max_model_len or min(model.max_model_len, _DEFAULT_LENGTH)
    per_token = 8 * model.hidden_size + 4 * model.intermediate_size
    kv_heads = max(model.num_kv_heads, size)
    kv_row = 2 * kv_heads * model.head_size * item
    activations = (
        config.max_num_batched_tokens * per_token * item
        + 2 * model.max_model_len * kv_row
        # Logits of one pass with their copies, gathered keys and values, masks.
        + 256 * _MIB
    )
    kv = (length + 2 * config.block_size) * model.num_layers * kv_row
    needed = weights + in_use + size * _RUNTIME_GROWTH + activations + kv
    unit = 64 * _MIB
    return math.ceil(needed / config.gpu_memory_utilization / unit) * unit


def _fitting_size(model: ServedModel, dtype: torch.dtype, free: int, *, above: int) -> int | None:
    for size in allowed_parallel_sizes(model):
        # A fifth for activations, runtime and KV.
        if size > above and 1.2 * weight_bytes(model, dtype, 0, size, "cuda") <= free:
            return size
    return None
