"""The gated activation in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """As ``ops.silu_and_mul``."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
