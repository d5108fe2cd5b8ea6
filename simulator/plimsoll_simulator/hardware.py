"""Devices and models as figures. In: nothing. Out: frozen values; bytes are bytes, lengths tokens.

The sums are vLLM's: the cache gets ``utilization`` of the device less weights and what was reserved
at start. Measured: the RTX 4090's total and reserve (vLLM 0.19.0 with 0.9 and 2588 blocks of 16).
Assumed: 1.5 GiB of reserve on all others, and that a card reaches 90 % of its data sheet's bandwidth
and 70 % of its dense 16-bit operations (the A100's 1.4 of 1.56 TB/s and 220 of 312 TFLOP/s).
"""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll_operator.budget.devices import DEVICES

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Model:
    name: str
    parameters: float
    weight_bytes: int
    kv_bytes_per_token: int
    vocab_size: int
    hidden_size: int
    # The longest request that its positions allow.
    native_length: int


@dataclass(frozen=True)
class Hardware:
    """``reserved_bytes``: context, graphs and the activations that a start profiles, together;
    ``bandwidth`` bytes a second of its memory, ``flops`` operations a second, as reached."""

    name: str
    total_bytes: int
    reserved_bytes: int
    bandwidth: float
    flops: float


LLAMA_3_1_8B = Model(
    name="Llama-3.1-8B",
    parameters=8.03e9,
    weight_bytes=16_060_000_000,
    kv_bytes_per_token=128 * 1024,
    vocab_size=128_256,
    hidden_size=4096,
    native_length=131_072,
)

RTX_4090 = Hardware(
    name="rtx4090-24gb",
    total_bytes=25_250_627_584,
    # 0.9 of the total, less weights and 2588 blocks.
    reserved_bytes=int(0.9 * 25_250_627_584) - 16_060_000_000 - 2588 * 16 * 128 * 1024,
    bandwidth=0.9 * 1.008e12,
    flops=0.7 * 1.652e14,
)
# 1.4 TB/s and 220 TFLOP/s: what an A100 reaches of its 1.56 TB/s and 312 TFLOP/s (assumed).
A100_40 = Hardware(
    name="a100-40gb",
    # As CUDA reports it, here and below.
    total_bytes=int(39.39 * GIB),
    reserved_bytes=3 * GIB // 2,
    bandwidth=1.4e12,
    flops=2.2e14,
)
A100_80 = Hardware(
    name="a100-80gb",
    total_bytes=int(79.15 * GIB),
    reserved_bytes=3 * GIB // 2,
    bandwidth=1.4e12,
    flops=2.2e14,
)


def _by_data_sheet(name: str, total: str, terabytes: float, teraflops: float) -> Hardware:
    return Hardware(
        name, DEVICES[total], 3 * GIB // 2, 0.9 * terabytes * 1e12, 0.7 * teraflops * 1e12
    )


SHAPES = {
    shape.name: shape
    for shape in (
        RTX_4090,
        A100_40,
        A100_80,
        _by_data_sheet("a10-24gb", "A10-24G", 0.600, 125),
        _by_data_sheet("l40s-48gb", "L40S-48G", 0.864, 362),
        _by_data_sheet("h100-80gb", "H100-80G", 3.35, 989),
        _by_data_sheet("h100-94gb", "H100-94G", 3.9, 835),
        _by_data_sheet("h200-141gb", "H200-141G", 4.8, 989),
    )
}


class UnknownHardware(ValueError):
    """No such device, or more than one."""


def find_hardware(name: str) -> Hardware:
    """``l40s-48gb``, ``L40S-48G`` or, where there is one size alone, ``L40S``. Raises
    UnknownHardware."""
    wanted = name.lower()
    found = [
        shape
        for key, shape in SHAPES.items()
        if wanted in (key, key.removesuffix("b"), key.partition("-")[0])
    ]
    if len(found) != 1:
        allowed = ", ".join(shape.name for shape in found or SHAPES.values())
        raise UnknownHardware(f"--gpu is {name!r}; expected one of {allowed}")
    return found[0]


BLOCK_SIZE = 16


def pool_blocks(hardware: Hardware, model: Model, utilization: float) -> int:
    """Blocks of the cache at ``utilization``; 0 when nothing is left for it."""
    available = utilization * hardware.total_bytes - model.weight_bytes - hardware.reserved_bytes
    return max(0, int(available) // (BLOCK_SIZE * model.kv_bytes_per_token))
