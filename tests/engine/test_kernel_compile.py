"""The kernels compile for Ampere, Hopper and Blackwell, within budgets, on a machine without GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plimsoll_engine.ops.launch_shape import launch_shape
from support.kernel_builds import (
    Build,
    Usage,
    attention_build,
    compile_build,
    kv_write_build,
    read_usage,
    reduce_build,
    rms_norm_build,
    rotary_build,
    silu_and_mul_build,
)

CAPABILITIES = (80, 90, 100)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

# What each build took for sm_80, sm_90 and sm_100 with triton 3.9, as (registers of a thread, bytes
# of its stack, shared bytes of a program). Registers are handed out by eights, so up to the next
# eight is not more; the rest may not grow by a byte. A stack is spilled registers: ptxas moves some
# of them twice, for sm_80, to reach a rounder number of registers.
Budget = tuple[int, int, int]
BUDGETS: dict[str, tuple[Build, tuple[Budget, ...]]] = {
    "decode-head128": (
        attention_build(BF16, 4, 128, 1),
        ((96, 0, 8704), (90, 0, 8704), (90, 0, 8704)),
    ),
    "prefill-head64": (
        attention_build(BF16, 3, 64, 512),
        ((128, 16, 7168), (157, 0, 7168), (157, 0, 7168)),
    ),
    "prefill-head128": (
        attention_build(BF16, 4, 128, 512),
        ((254, 0, 13312), (254, 0, 13312), (254, 0, 13312)),
    ),
    "prefill-head128-window": (
        attention_build(BF16, 4, 128, 512, sliding_window=4096),
        ((254, 0, 13312), (254, 0, 13312), (254, 0, 13312)),
    ),
    "prefill-head128-cap": (
        attention_build(BF16, 4, 128, 512, soft_cap=50.0),
        ((254, 0, 13312), (254, 0, 13312), (254, 0, 13312)),
    ),
    "prefill-fp16-head80": (
        attention_build(F16, 1, 80, 512),
        ((128, 0, 8704), (128, 0, 8704), (128, 0, 8704)),
    ),
    "prefill-fp32": (
        attention_build(F32, 4, 128, 512),
        ((128, 0, 25920), (141, 0, 25920), (142, 0, 25920)),
    ),
    "prefill-head256": (
        attention_build(BF16, 4, 256, 512),
        ((254, 0, 25600), (213, 0, 25600), (213, 0, 25600)),
    ),
    "split-head128": (
        attention_build(BF16, 4, 128, 1, split=True),
        ((96, 0, 8704), (106, 0, 8704), (106, 0, 8704)),
    ),
    "split-head96-window": (
        attention_build(F16, 8, 96, 1, split=True, sliding_window=4096),
        ((128, 0, 8704), (122, 0, 8704), (122, 0, 8704)),
    ),
    "split-head256": (
        attention_build(BF16, 4, 256, 1, split=True),
        ((146, 0, 16896), (119, 0, 16896), (119, 0, 16896)),
    ),
    "decode-fp16-head64": (
        attention_build(F16, 4, 64, 1),
        ((80, 0, 4608), (71, 0, 4608), (71, 0, 4608)),
    ),
    "decode-head256": (
        attention_build(BF16, 4, 256, 1),
        ((148, 0, 16896), (125, 0, 16896), (124, 0, 16896)),
    ),
    # Blocks of 16 above; the size of a block is a constant of the build.
    "decode-block32": (
        attention_build(BF16, 4, 128, 1, block_size=32),
        ((96, 0, 8704), (109, 0, 8704), (109, 0, 8704)),
    ),
    "decode-block48": (
        attention_build(BF16, 4, 128, 1, block_size=48),
        ((96, 8, 8704), (105, 0, 8704), (105, 0, 8704)),
    ),
    "prefill-block48": (
        attention_build(BF16, 4, 64, 512, block_size=48),
        ((128, 0, 7168), (149, 0, 7168), (149, 0, 7168)),
    ),
    "prefill-fp16-block32": (
        attention_build(F16, 4, 128, 512, block_size=32),
        ((254, 0, 13312), (254, 0, 13312), (254, 0, 13312)),
    ),
    "split-block48": (
        attention_build(BF16, 4, 128, 1, split=True, block_size=48),
        ((114, 0, 8704), (108, 0, 8704), (108, 0, 8704)),
    ),
    "split-fp16-head64": (
        attention_build(F16, 4, 64, 1, split=True),
        ((80, 0, 4608), (66, 0, 4608), (66, 0, 4608)),
    ),
    "reduce-head64": (reduce_build(64), ((56, 0, 0), (56, 0, 0), (56, 0, 0))),
    "reduce-head256": (reduce_build(256), ((85, 0, 0), (82, 0, 0), (74, 0, 0))),
    "reduce-head128": (reduce_build(128), ((72, 0, 0), (79, 0, 0), (66, 0, 0))),
    "kv-write": (kv_write_build(), ((28, 0, 256), (30, 0, 256), (30, 0, 256))),
    "kv-write-block48": (kv_write_build(48), ((26, 0, 256), (28, 0, 256), (28, 0, 256))),
    "rms-norm": (
        rms_norm_build(4096, residual=False),
        ((48, 0, 16), (48, 0, 16), (56, 0, 16)),
    ),
    "add-rms-norm": (
        rms_norm_build(4096, residual=True),
        ((50, 0, 16), (54, 0, 16), (52, 0, 16)),
    ),
    "rotary": (rotary_build(128), ((32, 0, 0), (32, 0, 0), (32, 0, 0))),
    "silu-and-mul": (silu_and_mul_build(), ((29, 0, 0), (29, 0, 0), (29, 0, 0))),
}

# Compiled for sm_90 alone: variants of what is compiled for all three, and the slowest to compile.
# Their other figures are what they took when the table was made.
HOPPER_ONLY = (
    "prefill-head128-window",
    "prefill-head128-cap",
    "prefill-fp16-head80",
    "prefill-fp32",
    "prefill-head256",
    "split-head96-window",
    "split-head256",
)
COMPILED = [
    (name, arch)
    for name in BUDGETS
    for arch in CAPABILITIES
    if arch == 90 or name not in HOPPER_ONLY
]


@pytest.mark.parametrize(("name", "arch"), COMPILED)
def test_kernel_compiles_within_its_budget(name: str, arch: int, tmp_path: Path) -> None:
    build, budgets = BUDGETS[name]
    budget = Usage(*budgets[CAPABILITIES.index(arch)])
    compiled = compile_build(build, arch)
    assert f".target sm_{arch}" in compiled.asm["ptx"]
    usage = read_usage(compiled, tmp_path)
    assert usage.registers <= -(-budget.registers // 8) * 8
    assert usage.stack <= budget.stack
    assert usage.shared <= budget.shared


def test_grouped_heads_fill_the_rows_of_matrix_products() -> None:
    """Nine query heads on three KV heads: five tokens by three heads in sixteen rows."""
    three = launch_shape(3, 1, 64, torch.bfloat16)
    assert (three.block_m, three.block_q) == (16, 5)
    many = launch_shape(24, 1, 64, torch.bfloat16)
    assert (many.block_m, many.block_q) == (32, 1)


def test_tile_is_chosen_apart_from_the_block_size() -> None:
    def tile(queries: int, head_size: int, dtype: torch.dtype) -> int:
        return launch_shape(4, queries, head_size, dtype).tile

    assert tile(2, 64, torch.bfloat16) == 32
    assert tile(1, 64, torch.bfloat16) == 16
    # Wider tiles would spill registers here.
    assert tile(2, 80, torch.bfloat16) == 16
    assert tile(2, 64, torch.float32) == 16
