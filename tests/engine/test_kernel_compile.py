"""The kernels compile for Ampere, Hopper and Blackwell, within budgets, on a machine without GPU."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import triton  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.compiler import ASTSource  # type: ignore[import-untyped]

from plimsoll_engine.kernels.kv_write import kv_write_kernel
from plimsoll_engine.kernels.paged_attention import paged_attention_kernel
from plimsoll_engine.ops.compile_options import COMPILE_OPTIONS
from plimsoll_engine.ops.paged_attention import launch_shape

CAPABILITIES = (80, 90, 100)
ELEMENT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
# Registers per thread and bytes per program. 128 threads of 255 registers still let two programs
# share a multiprocessor; 48 KiB is what any of these devices gives without opting in.
MAX_REGISTERS = 255
MAX_SHARED = 48 << 10
# Spills: ptxas may put four values of a thread into local memory to reach a rounder number of
# registers (it does so for sm_80 once), but not a tile.
MAX_STACK = 16


@dataclass(frozen=True)
class Shape:
    name: str
    dtype: torch.dtype
    group: int
    head_size: int
    max_query_len: int


SHAPES = (
    Shape("decode-smollm2", torch.bfloat16, 3, 64, 1),
    Shape("prefill-smollm2", torch.bfloat16, 3, 64, 512),
    Shape("decode-8b", torch.bfloat16, 4, 128, 1),
    Shape("prefill-8b", torch.bfloat16, 4, 128, 512),
    Shape("prefill-fp16-head80", torch.float16, 1, 80, 512),
    Shape("prefill-fp32", torch.float32, 4, 128, 512),
    Shape("prefill-head256", torch.bfloat16, 4, 256, 512),
)


def compile_kernel(
    kernel: object, signature: dict[str, str], constants: dict[str, int], warps: int, arch: int
) -> triton.compiler.CompiledKernel:
    names = [parameter.name for parameter in kernel.params]  # type: ignore[attr-defined]
    full = {name: signature.get(name, "constexpr") for name in names}
    # What the launcher's specialisation finds in practice: aligned tensors, strides that are
    # multiples of 16 elements.
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if kind.startswith("*") or name.startswith("stride_")
    }
    source = ASTSource(fn=kernel, signature=full, constexprs=constants, attrs=aligned)
    return triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, **COMPILE_OPTIONS}
    )


def resource_usage(compiled: triton.compiler.CompiledKernel, folder: Path) -> dict[str, int]:
    """REG, STACK, LOCAL... of a cubin, as the toolkit reads them."""
    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    result = subprocess.run(
        [CUOBJDUMP, "--dump-resource-usage", path], check=True, capture_output=True, text=True
    )
    usage = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", result.stdout)}
    assert usage, result.stdout
    return usage


def attention_arguments(shape: Shape) -> tuple[dict[str, str], dict[str, int], int]:
    launch = launch_shape(shape.group, shape.max_query_len, shape.head_size, shape.dtype)
    element = f"*{ELEMENT[shape.dtype]}"
    signature = {
        "out_ptr": element,
        "query_ptr": element,
        "segment_table_ptr": "*i64",
        "block_tables_ptr": "*i32",
        "query_starts_ptr": "*i32",
        "context_lens_ptr": "*i32",
        "scale_log2": "fp32",
        **dict.fromkeys(
            (
                "layer",
                "num_sequences",
                "stride_out_token",
                "stride_out_head",
                "stride_query_token",
                "stride_query_head",
                "stride_table",
            ),
            "i32",
        ),
    }
    constants = {
        "BLOCKS_PER_SEGMENT": 64,
        "BLOCK_SIZE": 16,
        "KV_HEADS": 8,
        "GROUP": shape.group,
        "HEAD_SIZE": shape.head_size,
        "PADDED_HEAD_SIZE": triton.next_power_of_2(shape.head_size),
        "BLOCK_M": launch.block_m,
        "BLOCK_Q": launch.block_q,
        "TILE": launch.tile,
    }
    return signature, constants, launch.num_warps


@pytest.mark.parametrize("arch", CAPABILITIES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_paged_attention_compiles(shape: Shape, arch: int, tmp_path: Path) -> None:
    signature, constants, warps = attention_arguments(shape)
    compiled = compile_kernel(paged_attention_kernel, signature, constants, warps, arch)
    assert f".target sm_{arch}" in compiled.asm["ptx"]
    usage = resource_usage(compiled, tmp_path)
    assert usage["REG"] <= MAX_REGISTERS
    assert usage["STACK"] <= MAX_STACK
    assert usage["LOCAL"] == 0
    assert compiled.metadata.shared <= MAX_SHARED


@pytest.mark.parametrize("arch", CAPABILITIES)
def test_kv_write_compiles(arch: int, tmp_path: Path) -> None:
    signature = {
        "key_ptr": "*bf16",
        "value_ptr": "*bf16",
        "slots_ptr": "*i64",
        "segment_table_ptr": "*i64",
        **dict.fromkeys(
            (
                "layer",
                "stride_key_token",
                "stride_key_head",
                "stride_value_token",
                "stride_value_head",
            ),
            "i32",
        ),
    }
    constants = {
        "BLOCKS_PER_SEGMENT": 64,
        "BLOCK_SIZE": 16,
        "KV_HEADS": 8,
        "HEAD_SIZE": 128,
        "PADDED_HEAD_SIZE": 128,
    }
    compiled = compile_kernel(kv_write_kernel, signature, constants, 1, arch)
    assert f".target sm_{arch}" in compiled.asm["ptx"]
    usage = resource_usage(compiled, tmp_path)
    assert usage["REG"] <= 64
    assert usage["STACK"] == 0
    assert compiled.metadata.shared <= 1024


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
