"""Compiles kernels for GPUs that are not there, and reads what they take."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.compiler import ASTSource  # type: ignore[import-untyped]

from plimsoll_engine.kernels.kv_write import kv_write_kernel
from plimsoll_engine.kernels.paged_attention import paged_attention_kernel
from plimsoll_engine.kernels.rms_norm import rms_norm_kernel
from plimsoll_engine.kernels.rotary import rotary_kernel
from plimsoll_engine.kernels.silu_and_mul import silu_and_mul_kernel
from plimsoll_engine.kernels.split_attention import attend_splits_kernel, reduce_splits_kernel
from plimsoll_engine.ops.compile_options import COMPILE_OPTIONS
from plimsoll_engine.ops.launch_shape import launch_shape, padded_head_size
from plimsoll_engine.ops.rms_norm import num_warps
from plimsoll_engine.ops.rotary import heads_at_once
from plimsoll_engine.ops.silu_and_mul import BLOCK
from plimsoll_engine.ops.split_attention import NUM_SPLITS

ELEMENT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
KV_HEADS, BLOCK_SIZE, BLOCKS_PER_SEGMENT = 8, 16, 64


@dataclass(frozen=True)
class Build:
    """A kernel with the constants that its launcher would give it; other arguments by name:
    pointers and floats as in ``kinds``, the rest 32-bit integers."""

    kernel: Any
    kinds: dict[str, str]
    constants: dict[str, Any]
    num_warps: int


@dataclass(frozen=True)
class Usage:
    """Registers of a thread, its bytes of stack (spills), and shared bytes of a program."""

    registers: int
    stack: int
    shared: int


def compile_build(build: Build, arch: int) -> triton.compiler.CompiledKernel:
    names = [parameter.name for parameter in build.kernel.params]
    signature = {
        name: "constexpr" if name in build.constants else build.kinds.get(name, "i32")
        for name in names
    }
    # What the launcher's specialisation finds in practice: aligned tensors, strides that are
    # multiples of 16 elements.
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if kind.startswith("*") or (kind == "i32" and name.startswith("stride_"))
    }
    source = ASTSource(
        fn=build.kernel, signature=signature, constexprs=build.constants, attrs=aligned
    )
    options = {"num_warps": build.num_warps, **COMPILE_OPTIONS}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def read_usage(compiled: triton.compiler.CompiledKernel, folder: Path) -> Usage:
    """As the toolkit reads it from the cubin."""
    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    result = subprocess.run(
        [CUOBJDUMP, "--dump-resource-usage", path], check=True, capture_output=True, text=True
    )
    found = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", result.stdout)}
    return Usage(found["REG"], found["STACK"] + found["LOCAL"], compiled.metadata.shared)


def _pointers(element: str, names: str, **others: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), f"*{element}") | others


def attention_build(
    dtype: torch.dtype,
    group: int,
    head_size: int,
    max_query_len: int,
    *,
    split: bool = False,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    block_size: int = BLOCK_SIZE,
) -> Build:
    shape = launch_shape(group, max_query_len, head_size, dtype)
    kinds = _pointers(
        ELEMENT[dtype],
        "out_ptr query_ptr",
        segment_table_ptr="*i64",
        block_tables_ptr="*i32",
        query_starts_ptr="*i32",
        context_lens_ptr="*i32",
        scale_log2="fp32",
        partials_ptr="*fp32",
        maxima_ptr="*fp32",
        sums_ptr="*fp32",
    )
    constants = {
        "BLOCKS_PER_SEGMENT": BLOCKS_PER_SEGMENT,
        "BLOCK_SIZE": block_size,
        "KV_HEADS": KV_HEADS,
        "GROUP": group,
        "HEAD_SIZE": head_size,
        "PADDED_HEAD_SIZE": padded_head_size(head_size),
        "BLOCK_M": shape.block_m,
        "TILE": shape.tile,
        "WINDOW": sliding_window,
        "SOFT_CAP": soft_cap,
    }
    if split:
        constants["NUM_SPLITS"] = NUM_SPLITS
        return Build(attend_splits_kernel, kinds, constants, shape.num_warps)
    constants["BLOCK_Q"] = shape.block_q
    return Build(paged_attention_kernel, kinds, constants, shape.num_warps)


def reduce_build(head_size: int) -> Build:
    kinds = _pointers("fp32", "partials_ptr maxima_ptr sums_ptr", out_ptr="*bf16")
    constants = {
        "HEADS": 4 * KV_HEADS,
        "HEAD_SIZE": head_size,
        "PADDED_HEAD_SIZE": padded_head_size(head_size),
        "NUM_SPLITS": NUM_SPLITS,
    }
    return Build(reduce_splits_kernel, kinds, constants, 1)


def kv_write_build(block_size: int = BLOCK_SIZE) -> Build:
    kinds = _pointers("bf16", "key_ptr value_ptr", slots_ptr="*i64", segment_table_ptr="*i64")
    constants = {
        "BLOCKS_PER_SEGMENT": BLOCKS_PER_SEGMENT,
        "BLOCK_SIZE": block_size,
        "KV_HEADS": KV_HEADS,
        "HEAD_SIZE": 128,
        "PADDED_HEAD_SIZE": 128,
    }
    return Build(kv_write_kernel, kinds, constants, 1)


def rms_norm_build(size: int, *, residual: bool) -> Build:
    kinds = _pointers("bf16", "out_ptr sum_ptr x_ptr residual_ptr weight_ptr", epsilon="fp32")
    constants = {
        "GROUPS": 1,
        "SIZE": size,
        "PADDED_SIZE": triton.next_power_of_2(size),
        "HAS_RESIDUAL": residual,
    }
    if not residual:
        constants |= {"sum_ptr": None, "residual_ptr": None}
    return Build(rms_norm_kernel, kinds, constants, num_warps(size))


def rotary_build(head_size: int) -> Build:
    kinds = _pointers("bf16", "query_out_ptr key_out_ptr query_ptr key_ptr cos_ptr sin_ptr")
    constants = {
        "QUERY_HEADS": 4 * KV_HEADS,
        "KEY_HEADS": KV_HEADS,
        "HALF": head_size // 2,
        "PADDED_HALF": triton.next_power_of_2(head_size // 2),
        "HEADS_AT_ONCE": heads_at_once(head_size // 2),
    }
    return Build(rotary_kernel, kinds, constants, 4)


def silu_and_mul_build() -> Build:
    constants = {"SIZE": 14336, "BLOCK": BLOCK}
    return Build(silu_and_mul_kernel, _pointers("bf16", "out_ptr x_ptr"), constants, 4)
