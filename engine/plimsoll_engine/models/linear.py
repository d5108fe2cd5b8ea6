"""The weights that rows are multiplied by, kept as the device reads them best.

In: a weight [out, in] as the checkpoint has it, whose place is allocated here and filled by others.
Out: products. On the CPU oneDNN reads a weight in an order of its own and would bring it there again
in every product of more than one row; ``pack`` does so once and gives the first copy back. It knows
neither layers nor ranks.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F

# oneDNN and torch's layer above it each keep what they made for a shape, by default 1,024 times up to a
# MiB, and every number of rows is another shape. A step multiplies by five shapes. Read at first use.
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "16")

# Packed for so many rows: what fits batches of decoding costs larger ones nothing (docs/log.md).
_ROWS = 16


class Weight:
    def __init__(self, dense: torch.Tensor) -> None:
        """``dense`` [out, in] may be filled later, until ``pack``."""
        self._dense: torch.Tensor | None = dense
        self._packed: torch.Tensor | None = None

    @property
    def dense(self) -> torch.Tensor:
        """[out, in]; not after ``pack``."""
        assert self._dense is not None, "the weight is packed"
        return self._dense

    @property
    def is_packed(self) -> bool:
        return self._packed is not None

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [rows, in] -> [rows, out]; ``bias`` [out]."""
        if self._packed is None:
            return F.linear(x, self.dense, bias)
        # The last three say that nothing is applied to the product.
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, bias, "none", [], ""
        )
        return product

    def pack(self) -> None:
        """Changes nothing where ``packs`` says no."""
        if packs(self.dense.device.type, self.dense.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.dense, _ROWS)
            self._dense = None


def packs(device_kind: str, dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this type here: in bfloat16 and float16 not on every processor."""
    if device_kind != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    match dtype:
        case torch.float32:
            return True
        case torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        case torch.float16:
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False
