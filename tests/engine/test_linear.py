"""Weights as the checkpoint has them and as oneDNN reads them give the same products."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from plimsoll_engine.models.linear import Weight, packs

# Relative to the largest product: both sum in float32 and round once.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 5), (48, 16), (33, 130), (960, 576)])
def test_packed_weights_multiply_as_dense_ones(dtype: torch.dtype, rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    dense = torch.randn((rows, columns), generator=generator).to(dtype)
    bias = torch.randn(rows, generator=generator).to(dtype)
    weight = Weight(dense.clone())
    with torch.inference_mode():
        weight.pack()
        assert weight.is_packed == packs("cpu", dtype)
        for count in (1, 2, 16, 65):
            x = torch.randn((count, columns), generator=generator).to(dtype)
            for own_bias in (None, bias):
                expected = x.double() @ dense.double().T
                if own_bias is not None:
                    expected += own_bias.double()
                found = weight.multiply(x, own_bias)
                assert found.dtype == dtype
                assert found.shape == (count, rows)
                largest = max(1.0, expected.abs().max().item())
                assert (found.double() - expected).abs().max().item() <= TOLERANCE[dtype] * largest


def test_nothing_but_a_processor_packs() -> None:
    assert not packs("cuda", torch.float32)
    assert not packs("cpu", torch.float64)


# Prints by how many MiB the process grew while numbers of rows changed.
_CHANGING_ROWS = """
import torch
from plimsoll_engine.host_memory import used_bytes
from plimsoll_engine.models.linear import Weight

def run(counts):
    for count in counts:
        for weight, columns in weights:
            weight.multiply(torch.ones(count, columns))

weights = [(Weight(torch.ones(rows, columns)), columns) for rows, columns in
           ((960, 576), (576, 576), (3072, 576), (576, 1536))]
with torch.inference_mode():
    for weight, _ in weights:
        weight.pack()
    run((1, 100, 200, 300))
    before = used_bytes()
    run(range(20, 260, 2))
print((used_bytes() - before) >> 20)
"""


def test_changing_numbers_of_rows_take_no_more_memory() -> None:
    """A fault seen: 146 MiB in three minutes of mixed load, and no end before a GiB."""
    unbounded = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    environ = {name: value for name, value in os.environ.items() if name not in unbounded}

    def growth(**settings: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", _CHANGING_ROWS],
            env=environ | settings,
            check=True,
            capture_output=True,
            text=True,
        )
        return int(done.stdout)

    assert growth() < 32
    # So much it would be, or the measure sees nothing.
    assert growth(**dict.fromkeys(unbounded, "1024")) > 64
