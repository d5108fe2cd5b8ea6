"""Models in transformers' own code with the engine's attention, against transformers alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from plimsoll_engine.config import DeviceType, EngineConfig, LoadFormat
from plimsoll_engine.model_runner import ModelRunner
from plimsoll_engine.models.backends import check_parallel_size, load_served_model
from plimsoll_engine.models.source import ModelSource
from plimsoll_engine.models.transformers_trial import try_model
from plimsoll_engine.sampling_params import SamplingParams
from plimsoll_engine.termination import EngineFailure, FailureClass
from support.greedy_loop import generate
from support.tiny_models import VOCAB_SIZE, reference_greedy, reference_model, save_tiny_model
from support.transformers_families import FAMILIES, tiny_config

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
# The windows are shorter than the last of them, and so is the budget: prompts in chunks.
PROMPT_LENGTHS = (1, 16, 45)
BUDGET = 20
GIB = 1 << 30


def open_runner(folder: Path, **settings: Any) -> ModelRunner:
    config = EngineConfig(
        model=str(folder), device=DeviceType.CPU, device_memory=8 * GIB, **settings
    )
    runner = ModelRunner(config, "cpu")
    runner.load()
    return runner


def random_prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(VOCAB_SIZE), k=length)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Batched with others in chunks, and the longest alone."""
    save_tiny_model(FAMILIES[family], tmp_path)
    prompts = [random_prompt(length) for length in PROMPT_LENGTHS]
    reference = reference_model(tmp_path)
    expected = [reference_greedy(reference, prompt, GREEDY.max_tokens) for prompt in prompts]
    runner = open_runner(tmp_path)
    together = generate(runner, prompts, GREEDY, block_size=16, budget=BUDGET)
    assert [list(result.token_ids) for result in together] == expected
    [alone] = generate(runner, prompts[-1:], GREEDY, block_size=16)
    assert list(alone.token_ids) == expected[-1]
    runner.shutdown()


def test_attention_is_read_from_the_models_own_code() -> None:
    model = try_model(FAMILIES["gemma2"])
    first, second = model.attention
    assert (first.sliding_window, second.sliding_window) == (20, None)
    assert (first.soft_cap, first.scale) == (5.0, 24**-0.5)
    assert (model.num_heads, model.num_kv_heads, model.head_size) == (4, 2, 16)
    assert (model.vocab_size, model.max_model_len) == (VOCAB_SIZE, 256)
    by_layer = try_model(FAMILIES["gpt2"]).attention
    assert [own.scale for own in by_layer] == [0.25, 0.125]


def test_length_ends_where_angles_would_depend_on_the_batch() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    }
    config = tiny_config("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    assert try_model(config).max_model_len == 64


# Model type -> what is said of it.
REFUSED = {
    "mamba": "state beside keys and values",
    "rwkv": "state beside keys and values",
    "bloom": "no support for transformers' attention interface",
    "stablelm": "no support for transformers' attention interface",
    "deepseek_v3": "queries (1, 128, 3, 192), keys (1, 128, 3, 192) and values (1, 128, 3, 128)",
    "llama4_text": "layers of the type chunked_attention",
    "bert": "attention to later tokens",
    "gpt_oss": "s_aux in its attention",
    "t5": "more parts than one decoder",
    "gemma3": "more parts than one decoder",
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_model_that_cannot_be_run_is_refused_by_its_type(model_type: str, tmp_path: Path) -> None:
    """Before weights are read: there are none."""
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(EngineFailure) as raised:
        load_served_model(ModelSource(tmp_path))
    failure = raised.value
    assert failure.failure_class is FailureClass.MODEL_LOAD_FAILED
    assert f"the model's type {model_type} has {REFUSED[model_type]}" in failure.message
    assert "supported: " in failure.message


def test_memory_is_told_and_held(tmp_path: Path) -> None:
    """The whole model is run to measure, and its weights are those that were foretold."""
    save_tiny_model(FAMILIES["gemma2"], tmp_path)
    runner = open_runner(tmp_path)
    figures = runner.profile(max_num_batched_tokens=128, max_num_seqs=4, max_model_len=200)
    model = try_model(AutoConfig.from_pretrained(tmp_path))
    assert figures.weights == pytest.approx(4 * model.num_parameters, rel=0.01)
    # Keys and values of two layers, two KV heads of 16, 16 tokens, float32.
    assert figures.bytes_per_block == 2 * 2 * 2 * 16 * 16 * 4
    assert figures.activations > 0
    runner.shutdown()


def test_several_ranks_are_refused(tmp_path: Path) -> None:
    save_tiny_model(FAMILIES["olmo2"], tmp_path)
    model = load_served_model(ModelSource(tmp_path))
    with pytest.raises(EngineFailure, match="Olmo2ForCausalLM runs in transformers' own code"):
        check_parallel_size(model, 2)


def test_weights_are_not_drawn_for_it(tmp_path: Path) -> None:
    save_tiny_model(FAMILIES["gpt2"], tmp_path)
    with pytest.raises(
        EngineFailure, match=r"--load-format dummy: GPT2LMHeadModel.*auto"
    ) as caught:
        open_runner(tmp_path, load_format=LoadFormat.DUMMY)
    assert caught.value.failure_class is FailureClass.INVALID_CONFIGURATION


def test_weight_that_is_missing_is_not_drawn_at_random(tmp_path: Path) -> None:
    save_tiny_model(FAMILIES["olmo2"], tmp_path)
    weights: dict[str, torch.Tensor] = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineFailure, match=f"lacks 1 weights, the first being {name}"):
        open_runner(tmp_path)
