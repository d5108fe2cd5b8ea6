"""Launches the gated activation; see ``kernels.silu_and_mul``."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]

from plimsoll_engine.kernels.silu_and_mul import silu_and_mul_kernel
from plimsoll_engine.ops.compile_options import COMPILE_OPTIONS

BLOCK = 1024


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, 2 * size], the gate's columns first -> [tokens, size]."""
    tokens, width = x.shape
    if width % 2 or x.stride(-1) != 1:
        raise ValueError(f"x {tuple(x.shape)} must be rows of a gate and as much to be gated")
    size = width // 2
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    silu_and_mul_kernel[(tokens, triton.cdiv(size, BLOCK))](
        out, x, x.stride(0), SIZE=size, BLOCK=BLOCK, num_warps=4, **COMPILE_OPTIONS
    )
    return out
