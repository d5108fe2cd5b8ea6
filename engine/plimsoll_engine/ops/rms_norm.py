"""Launches RMS norm, with and without a residual; see ``kernels.rms_norm``."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]

from plimsoll_engine.kernels.rms_norm import rms_norm_kernel
from plimsoll_engine.ops.compile_options import COMPILE_OPTIONS

# Elements of a row per warp: 32 threads with 16 bytes of a 16-bit type each, four times.
_ELEMENTS_PER_WARP = 1024
_MAX_WARPS = 16


def num_warps(size: int) -> int:
    warps: int = triton.next_power_of_2(triton.cdiv(size, _ELEMENTS_PER_WARP))
    return min(_MAX_WARPS, warps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x [tokens, size] or [tokens, heads, size], weight [size] of the same dtype -> x's shape."""
    _check(x, weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(out, None, x, None, weight, epsilon)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and residual [tokens, size] -> (the norm of their sum, their sum)."""
    _check(x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_contiguous():
        raise ValueError(
            f"the residual {residual.dtype} {tuple(residual.shape)} must be contiguous and like x, "
            f"{x.dtype} {tuple(x.shape)}"
        )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    _launch(out, total, x, residual, weight, epsilon)
    return out, total


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.ndim not in (2, 3) or x.stride(-1) != 1:
        raise ValueError(f"x {tuple(x.shape)} must be [tokens, size] or [tokens, heads, size]")
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(
            f"weight {weight.dtype} {tuple(weight.shape)} does not fit x {x.dtype} {tuple(x.shape)}"
        )


def _launch(
    out: torch.Tensor,
    total: torch.Tensor | None,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
) -> None:
    if x.numel() == 0:
        return
    groups, size = (1 if x.ndim == 2 else x.shape[1]), x.shape[-1]
    rms_norm_kernel[(x.shape[0], groups)](
        out,
        total,
        x,
        residual,
        weight,
        epsilon,
        x.stride(0),
        0 if x.ndim == 2 else x.stride(1),
        GROUPS=groups,
        SIZE=size,
        PADDED_SIZE=triton.next_power_of_2(size),
        HAS_RESIDUAL=residual is not None,
        num_warps=num_warps(size),
        **COMPILE_OPTIONS,
    )
