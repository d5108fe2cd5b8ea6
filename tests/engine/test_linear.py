"""Weights as the checkpoint has them and as oneDNN reads them give the same products."""

from __future__ import annotations

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
