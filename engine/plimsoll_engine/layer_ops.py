"""The small operations of a decoder's layer, with the implementation that fits the device.

In: a device and a type. Out: functions with one signature each; ``ops`` says what they take and
give. On CUDA they are Triton kernels, on the CPU native ones where these could be compiled, and
elsewhere (also where only sizes are asked for) plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from plimsoll_engine.native.ops import NativeKernels, find_kernels
from plimsoll_engine.reference.rms_norm import add_rms_norm, rms_norm
from plimsoll_engine.reference.rotary import rotary
from plimsoll_engine.reference.silu_and_mul import silu_and_mul

Tensor = torch.Tensor


@dataclass(frozen=True)
class LayerOps:
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]


TORCH_OPS = LayerOps(rms_norm, add_rms_norm, rotary, silu_and_mul)


def triton_ops() -> LayerOps:
    # Imported here: Triton is not there on every machine that runs the CPU path.
    from plimsoll_engine.ops.rms_norm import add_rms_norm, rms_norm
    from plimsoll_engine.ops.rotary import rotary
    from plimsoll_engine.ops.silu_and_mul import silu_and_mul

    return LayerOps(rms_norm, add_rms_norm, rotary, silu_and_mul)


def native_ops(kernels: NativeKernels) -> LayerOps:
    return LayerOps(kernels.rms_norm, kernels.add_rms_norm, kernels.rotary, kernels.silu_and_mul)


def choose_layer_ops(device: torch.device, dtype: torch.dtype) -> LayerOps:
    if device.type == "cuda":
        return triton_ops()
    kernels = find_kernels(dtype) if device.type == "cpu" else None
    return TORCH_OPS if kernels is None else native_ops(kernels)
