"""The small operations of a decoder's layer, with the implementation that fits the device.

In: a device. Out: functions with one signature each; ``ops`` says what they take and give. On CUDA
they are Triton kernels, elsewhere (on the CPU, and where only sizes are asked for) plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

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


def choose_layer_ops(device: torch.device) -> LayerOps:
    return triton_ops() if device.type == "cuda" else TORCH_OPS
