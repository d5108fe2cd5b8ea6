"""Every kernel against its plain-torch twin, under Triton's interpreter."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plimsoll_engine.attention_batch import build_attention_batch
from plimsoll_engine.ops import split_attention
from plimsoll_engine.reference.split_attention import SplitResults, reduce_splits
from support.kernel_cases import CASES, WRITE_CASES, KernelCase

TESTS = Path(__file__).parents[1]
# float16 rounds the softmax weights, scores of the twin, and the result.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
Measured = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def interpreted() -> Measured:
    """What ``support.kernel_cases`` measured under the interpreter."""
    path = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
        [sys.executable, "-m", "support.kernel_cases"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path)},
        check=True,
        capture_output=True,
        text=True,
    )
    measured: Measured = json.loads(result.stdout)
    return measured


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_is_that_of_the_twin(case: KernelCase, interpreted: Measured) -> None:
    """By what the launcher chooses, and where that is splits, also without them."""
    measured = interpreted[case.name]
    decode = all(queries == 1 for queries, _ in case.sequences)
    assert set(measured) == ({"attention", "whole"} if decode else {"attention"})
    assert max(measured.values()) < TOLERANCE[case.dtype]
    assert not any(math.isnan(difference) for difference in measured.values())


@pytest.mark.parametrize("case", WRITE_CASES, ids=lambda case: case.name)
def test_keys_and_values_are_written_where_they_belong(
    case: KernelCase, interpreted: Measured
) -> None:
    assert interpreted[case.name] == {"write": 0.0, "elsewhere": 0.0}


def test_rows_of_nobody_store_nothing_and_read_nothing(interpreted: Measured) -> None:
    found = interpreted["nobody"]
    assert (found["stored"], found["given"]) == (0.0, 0.0)
    assert found["owned"] <= 4e-6


def test_splits_divide_what_the_window_shows(interpreted: Measured) -> None:
    """Positions 81 to 100 lie in two tiles: the first two splits have one each."""
    assert interpreted["splits"]["last_filled"] == 1
    assert interpreted["splits"]["reduce"] < TOLERANCE[torch.float32]


def test_offsets_have_64_bits(interpreted: Measured) -> None:
    """In a segment of 2^33 elements."""
    measured = interpreted["wide-segment"]
    assert measured["write"] == 0.0
    assert measured["attention"] < TOLERANCE[torch.float16]
    assert measured["whole"] < TOLERANCE[torch.float16]


def test_small_kernels_are_their_twins(interpreted: Measured) -> None:
    measured = interpreted["layer-ops"]
    assert len(measured) == 14
    for name, difference in measured.items():
        if name.endswith("fp16"):
            # Rounded where torch rounds.
            assert difference == 0.0, name
        elif name.startswith("silu_and_mul"):
            # Of values up to 2e4: four in the last place.
            assert difference < 1e-2, name
        else:
            assert difference < 2e-6, name


def test_decoder_on_kernels_is_the_decoder(interpreted: Measured) -> None:
    assert interpreted["decoder"]["hidden"] < 2e-6


def test_few_decodes_are_split_and_nothing_else() -> None:
    def batch(*query_lens: int) -> bool:
        lengths = [33] * len(query_lens)
        tables = [[0, 1, 2]] * len(query_lens)
        described = build_attention_batch(query_lens, lengths, tables, torch.device("cpu"))
        return split_attention.is_split(described, num_kv_heads=8)

    assert batch(1)
    assert batch(*[1] * 16)
    assert not batch(*[1] * 17)
    assert not batch(1, 2)
    assert not batch(33)


def test_parts_are_joined_as_if_there_were_none() -> None:
    """Also with empty parts, whose partials are NaN, and for a row that saw nothing at all."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64) * 20
    values = torch.randn(5, 8, generator=generator, dtype=torch.float64)
    scores[0, 1, 2] = -torch.inf
    scores[1, 2] = -torch.inf
    maxima = scores.amax(-1)
    weights = torch.exp2(scores - maxima.clamp(min=-1e9)[..., None])
    partials = weights @ values
    partials[maxima == -torch.inf] = torch.nan
    results = SplitResults(partials.float(), maxima.float(), weights.sum(-1).float())

    flat = scores.flatten(2) * math.log(2.0)
    expected = flat.softmax(-1).nan_to_num() @ values.repeat(4, 1)
    joined = reduce_splits(results, torch.float64)
    torch.testing.assert_close(joined, expected, atol=1e-6, rtol=0.0)
    assert (joined[1, 2] == 0.0).all()
