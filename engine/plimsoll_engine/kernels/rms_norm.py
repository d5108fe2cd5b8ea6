"""RMS norm over the last dimension, after adding a residual where there is one.

    sum = x + residual                                     (only with HAS_RESIDUAL)
    out = weight * (sum / sqrt(mean(sum^2) + epsilon))

x, residual, out, sum [tokens, groups, size]: a hidden state is one group, a query a group for each
head. weight [size]. One program computes one row, in float32, rounded to the element type where
plain torch rounds: after the addition, and before the weight.
"""

# A kernel's arguments have no Python types, and triton ships none.
# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    out_ptr,
    sum_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    epsilon,
    stride_x_token,
    stride_x_group,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    element = x_ptr.dtype.element_ty
    dims = tl.arange(0, PADDED_SIZE)
    inside = dims < SIZE
    # All but x are contiguous.
    row = (token * GROUPS + group) * SIZE + dims
    x = tl.load(
        x_ptr + token * stride_x_token + group * stride_x_group + dims, mask=inside, other=0.0
    ).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row, mask=inside, other=0.0).to(tl.float32)
        total = (x + residual).to(element)
        tl.store(sum_ptr + row, total, mask=inside)
        x = total.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + epsilon)
    weight = tl.load(weight_ptr + dims, mask=inside, other=0.0).to(tl.float32)
    normed = (x * factor).to(element).to(tl.float32)
    tl.store(out_ptr + row, (weight * normed).to(element), mask=inside)
