"""The byte budget of `kubectl plimsoll plan`, held against the engine's own arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plimsoll_engine.executor import MemoryFigures
from plimsoll_engine.kv_cache import plan_layout
from plimsoll_engine.memory import build_plan
from plimsoll_engine.models.backends import weight_bytes
from plimsoll_engine.models.config import DTYPES, ModelConfig, load_model_config
from plimsoll_engine.models.source import ModelSource
from plimsoll_engine.parallel.shard import allowed_sizes
from plimsoll_engine.termination import EngineFailure
from plimsoll_operator.budget.devices import DEVICES
from plimsoll_operator.budget.memory import (
    GIB,
    MIB,
    Budget,
    InvalidSetup,
    Setup,
    allowed_tensor_sizes,
    build_budget,
)
from plimsoll_operator.budget.model import InvalidModel, read_model_shape
from plimsoll_operator.budget.verdict import judge
from support.model_configs import LLAMA_3_70B, MODEL_CONFIGS

Json = dict[str, Any]
LARGEST_SIZE = 16
SETUP = Setup(
    device=80 * GIB,
    tensor_parallel_size=4,
    block_size=16,
    utilization=0.90,
    max_model_len=8192,
    max_num_batched_tokens=2048,
)


def engine_model(config: Json, folder: Path) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return load_model_config(ModelSource(folder))


def budget(config: Json = LLAMA_3_70B, **changes: Any) -> Budget:
    return build_budget(read_model_shape(config), replace(SETUP, **changes))


@pytest.mark.parametrize("name", MODEL_CONFIGS)
def test_a_model_is_read_as_the_engine_reads_it(name: str, tmp_path: Path) -> None:
    config = MODEL_CONFIGS[name]
    theirs, ours = engine_model(config, tmp_path), read_model_shape(config)
    for field in vars(ours):
        if field != "dtype":
            assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.dtype == theirs.stored_dtype
    assert allowed_tensor_sizes(ours) == allowed_sizes(theirs.num_heads, theirs.num_kv_heads)


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("name", MODEL_CONFIGS)
def test_weights_and_cache_are_those_of_the_engine(
    name: str, block_size: int, tmp_path: Path
) -> None:
    theirs = engine_model(MODEL_CONFIGS[name], tmp_path)
    dtype = DTYPES[theirs.stored_dtype]
    for size in allowed_sizes(theirs.num_heads, theirs.num_kv_heads):
        if size > LARGEST_SIZE:
            break
        ours = budget(
            MODEL_CONFIGS[name],
            tensor_parallel_size=size,
            block_size=block_size,
            max_model_len=None,
        )
        ranks = range(size) if size <= 4 else (0, size - 1)
        assert ours.weight_bytes == max(
            weight_bytes(theirs, dtype, rank, size, "cuda") for rank in ranks
        )
        layout = plan_layout(
            num_layers=theirs.num_layers,
            num_kv_heads=len(theirs.shard(0, size).kv_heads),
            head_size=theirs.head_size,
            block_size=block_size,
            dtype=dtype,
            device_kind="cuda",
            device_bytes=ours.setup.device,
        )
        assert ours.bytes_per_block == layout.bytes_per_block


def test_on_cpu_all_ranks_share_the_container(tmp_path: Path) -> None:
    config = MODEL_CONFIGS["smollm2-135m"]
    theirs = engine_model(config, tmp_path)
    ours = budget(config, tensor_parallel_size=3, on_cpu=True, max_model_len=4096)
    float32 = DTYPES["float32"]
    assert ours.weight_bytes == sum(
        weight_bytes(theirs, float32, rank, 3, "cuda") for rank in range(3)
    )
    assert ours.bytes_per_token == 3 * 2 * 30 * 1 * 64 * 4


# (device GiB, utilization, length): what the engine would plan with the same figures.
@pytest.mark.parametrize(
    ("device", "utilization", "length"),
    [
        (80, 0.90, 8192),
        (80, 0.90, None),
        (80, 0.45, 8192),
        (80, 0.445, 8192),
        (40, 0.90, 8192),
        (40, 0.90, 4096),
        (40, 0.91, None),
    ],
)
def test_the_pool_and_the_verdict_are_those_of_the_engine(
    device: int, utilization: float, length: int | None
) -> None:
    ours = budget(device=device * GIB, utilization=utilization, max_model_len=length)
    figures = MemoryFigures(
        total=ours.setup.device,
        weights=ours.weight_bytes,
        activations=ours.activations,
        runtime=ours.runtime,
        bytes_per_block=ours.bytes_per_block,
    )
    try:
        theirs = build_plan(
            figures,
            free=figures.total - figures.weights - figures.runtime,
            utilization=utilization,
            block_size=16,
            model_max_len=ours.model.max_model_len,
            max_model_len=length,
        )
    except EngineFailure as failure:
        assert not judge(ours).fits
        fitting = failure.figures.get("max_model_len_that_fits", 0)
        assert ours.longest == min(int(fitting), ours.model.max_model_len)
        return
    assert judge(ours).fits
    assert (ours.num_blocks, ours.length) == (theirs.num_blocks, theirs.ceiling)
    assert ours.concurrency == theirs.pool_tokens / theirs.ceiling


def test_llama_3_70b_on_four_cards_of_80_gb() -> None:
    made = budget(device=DEVICES["H100-80G"])
    # 70.55 billion parameters of two bytes, a quarter of them.
    assert made.weight_bytes == pytest.approx(70.5537e9 * 2 / 4, rel=1e-4)
    # 2 x 80 layers x 2 KV heads x 128 x 2 bytes.
    assert made.bytes_per_token == 80 * 1024
    assert made.bytes_per_block == 1.25 * MIB
    verdict = judge(made)
    assert verdict.fits
    assert verdict.ways == ()
    assert made.concurrency is not None
    assert 50 < made.concurrency < 60


# What does not fit -> the ways out, as (field, value), and each is enough.
@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"tensor_parallel_size": 1}, ["spec.parallelism.tensor"]),
        (
            {"device": 40 * GIB, "utilization": 0.90, "max_num_batched_tokens": 4096},
            ["spec.engine.maxModelLen", "spec.engine.gpuMemoryUtilization"],
        ),
        ({"device": 36 * GIB}, ["spec.parallelism.tensor"]),
    ],
)
def test_what_does_not_fit_has_a_way_out(changes: Json, fields: list[str]) -> None:
    made = budget(**changes)
    verdict = judge(made)
    if verdict.fits:
        pytest.fail(f"expected a budget that does not fit: {verdict.text}")
    assert "does not fit" in verdict.text
    assert set(fields) <= {way.field for way in verdict.ways}
    parameter = {
        "spec.engine.maxModelLen": "max_model_len",
        "spec.engine.gpuMemoryUtilization": "utilization",
        "spec.parallelism.tensor": "tensor_parallel_size",
    }
    for way in verdict.ways:
        better = budget(**{**changes, parameter[way.field]: way.value})
        assert judge(better).fits, way


def test_on_cpu_more_memory_is_a_way_out() -> None:
    config = MODEL_CONFIGS["smollm2-135m"]
    setup: Json = {"tensor_parallel_size": 1, "on_cpu": True, "device": 900 * MIB}
    verdict = judge(budget(config, **setup))
    memory = {way.field: way.value for way in verdict.ways}["spec.resources.limits.memory"]
    assert not verdict.fits
    assert judge(budget(config, **{**setup, "device": memory})).fits


@pytest.mark.parametrize(
    ("changes", "field", "nearest"),
    [
        ({"tensor_parallel_size": 3}, "spec.parallelism.tensor", 2),
        ({"max_model_len": 9000}, "spec.engine.maxModelLen", 8192),
        ({"utilization": 1.5}, "spec.engine.gpuMemoryUtilization", 1),
    ],
)
def test_what_no_memory_cures_is_refused(changes: Json, field: str, nearest: int) -> None:
    with pytest.raises(InvalidSetup, match="allowed:") as caught:
        budget(**changes)
    assert (caught.value.field, caught.value.nearest) == (field, nearest)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "gpt2"}, "model_type is gpt2; allowed: llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type is missing"),
        ({"architectures": ["Other"]}, "architectures is Other; allowed: LlamaForCausalLM"),
        ({"hidden_size": None}, "hidden_size is missing; allowed: a whole number"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_hidden_layers": "80"}, "num_hidden_layers is '80'"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_key_value_heads": 7}, "num_attention_heads is 64; allowed: a multiple of"),
        ({"torch_dtype": "int8"}, "torch_dtype is int8; allowed: float32, bfloat16, float16"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling.rope_type is dynamic"),
        ({"rope_scaling": "llama3"}, "rope_scaling is llama3"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "a positive factor"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; allowed: true or false"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(change: Json, says: str) -> None:
    with pytest.raises(InvalidModel) as caught:
        read_model_shape({**LLAMA_3_70B, **change})
    assert says in str(caught.value)


def test_a_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(InvalidModel, match="allowed: a JSON object"):
        read_model_shape(["a list"])
