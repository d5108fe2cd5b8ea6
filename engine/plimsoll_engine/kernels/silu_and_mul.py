"""The gated activation: silu(gate) * up.

    out[t, i] = x[t, i] / (1 + exp(-x[t, i])) * x[t, size + i]

x [tokens, 2 * size], out [tokens, size]. One program computes BLOCK columns of one row, in float32,
rounded to the element type before the product, as in plain torch.
"""

# A kernel's arguments have no Python types, and triton ships none.
# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu_and_mul_kernel(out_ptr, x_ptr, stride_x_token, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    element = x_ptr.dtype.element_ty
    x = x_ptr + token * stride_x_token + columns
    gate = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + SIZE, mask=inside, other=0.0).to(tl.float32)
    # exp(-gate) may be infinite: the quotient is 0 then, as it must be.
    activated = (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32)
    tl.store(out_ptr + token * SIZE + columns, (activated * up).to(element), mask=inside)
