"""RMS norm, with and without a residual, in plain torch: Llama's own form (transformers)."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """As ``ops.rms_norm``."""
    wide = x.float()
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + epsilon)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``ops.rms_norm.add_rms_norm``."""
    total = residual + x
    return rms_norm(total, weight, epsilon), total
