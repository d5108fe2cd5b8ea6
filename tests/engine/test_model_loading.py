"""Finding a model's files, refusing what cannot be served, and telling what does not fit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from safetensors.torch import load_file, save_file

from plimsoll_engine import host_memory
from plimsoll_engine.config import CacheDType, DeviceType, DType, EngineConfig, LoadFormat
from plimsoll_engine.memory_estimate import check_weights_fit
from plimsoll_engine.model_runner import ModelRunner
from plimsoll_engine.models.backends import load_served_model, weight_bytes
from plimsoll_engine.models.config import load_model_config
from plimsoll_engine.models.source import ModelSource, resolve_model
from plimsoll_engine.sampling_params import SamplingParams
from plimsoll_engine.termination import EngineFailure, FailureClass, Phase
from support.greedy_loop import generate
from support.tiny_models import FAMILIES, VOCAB_SIZE, save_tiny_model

MIB = 1 << 20


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(FAMILIES["llama"], tmp_path_factory.mktemp("saved"))


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_key(folder: Path, key: str, value: object) -> None:
    change_config(folder, **{key: value})


def write_index(folder: Path, weight_map: object) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))


def load(model: Path | str, **settings: Any) -> ModelRunner:
    runner = ModelRunner(EngineConfig(model=str(model), device=DeviceType.CPU, **settings), "cpu")
    runner.load()
    return runner


@pytest.mark.parametrize(
    ("asked", "computed"),
    [
        (CacheDType.FP8_E4M3, DType.FLOAT32),
        (CacheDType.BFLOAT16, DType.FLOAT32),
        (CacheDType.FLOAT32, DType.BFLOAT16),
    ],
)
def test_cache_of_another_dtype_is_refused_before_weights_are_read(
    model: Path, asked: CacheDType, computed: DType
) -> None:
    for file in model.glob("*.safetensors"):
        file.unlink()
    failure = failure_of(model, kv_cache_dtype=asked, dtype=computed)
    assert failure.failure_class is FailureClass.INVALID_CONFIGURATION
    assert f"--kv-cache-dtype {asked}" in str(failure)
    assert f"allowed: auto, {computed}" in str(failure)
    assert failure.suggestion == {"flag": "--kv-cache-dtype", "value": "auto"}


def test_cache_may_be_of_the_models_dtype_by_name(model: Path) -> None:
    runner = load(model, kv_cache_dtype=CacheDType.BFLOAT16, dtype=DType.BFLOAT16)
    assert runner.cache.layout.dtype == torch.bfloat16
    runner.shutdown()


def test_weights_are_drawn_without_any_file_of_them(model: Path) -> None:
    for file in model.glob("*.safetensors"):
        file.unlink()
    runner = load(model, load_format=LoadFormat.DUMMY)
    params = SamplingParams(max_tokens=4, temperature=0.0)
    [result] = generate(runner, [[1, 2, 3]], params, block_size=16)
    assert len(result.token_ids) == 4
    runner.shutdown()
    assert failure_of(model).failure_class is FailureClass.MODEL_LOAD_FAILED


def failure_of(model: Path | str, **settings: Any) -> EngineFailure:
    with pytest.raises(EngineFailure) as failed:
        load(model, **settings)
    return failed.value


# What is wrong -> what the message must say.
SPOILS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "config is no JSON": (
        lambda folder: (folder / "config.json").write_text("{"),
        "cannot be read",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no *.safetensors"),
    "weights are cut off": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"\x10\x00\x00\x00"),
        "model.safetensors cannot be read",
    ),
    "weight missing": (
        lambda folder: drop_weight(folder, "model.layers.1.mlp.up_proj.weight"),
        "lacks 1 weights, the first being model.layers.1.mlp.up_proj.weight",
    ),
    "weight of another size": (
        lambda folder: change_config(folder, intermediate_size=200),
        "gate_proj.weight has shape (192, 128)",
    ),
    "another architecture": (
        lambda folder: change_config(
            folder, model_type="mamba", architectures=["MambaForCausalLM"]
        ),
        "the model's type mamba has state beside keys and values; supported: ",
    ),
    "another head": (
        lambda folder: change_config(folder, architectures=["LlamaForSequenceClassification"]),
        "LlamaForSequenceClassification is not supported; supported: LlamaForCausalLM",
    ),
    "another activation": (
        lambda folder: change_config(folder, hidden_act="gelu"),
        "activation gelu",
    ),
    "another rope scaling": (
        lambda folder: change_config(
            folder, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        ),
        "rope_type dynamic is not supported; supported: default, linear, llama3, yarn",
    ),
    **{
        f"index names {names!r}": (
            partial(write_index, weight_map=names),
            "model.safetensors.index.json",
        )
        for names in ({"a": 5}, {"a": [1], "b": "c"}, ["a"], 7)
    },
    **{
        f"{key} is {value!r}": (
            partial(change_key, key=key, value=value),
            key,
        )
        for key in (
            "num_key_value_heads",
            "num_attention_heads",
            "num_hidden_layers",
            "hidden_size",
            "vocab_size",
            "max_position_embeddings",
            "head_dim",
        )
        for value in (0, -1, "x", 1.5)
    },
    **{
        f"rope_theta is {value!r}": (
            partial(change_config, rope_parameters={"rope_type": "default", "rope_theta": value}),
            "rope",
        )
        for value in ("x", None, [1])
    },
    "shard missing": (
        lambda folder: (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"model.norm.weight": "model-00001.safetensors"}})
        ),
        "lacks model-00001.safetensors",
    ),
}


def drop_weight(folder: Path, name: str) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("what", SPOILS)
def test_model_that_cannot_be_served_is_told_by_name(model: Path, what: str) -> None:
    spoil, said = SPOILS[what]
    spoil(model)
    failure = failure_of(model)
    assert failure.failure_class is FailureClass.MODEL_LOAD_FAILED
    assert said in failure.message
    assert failure.exit_status == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("/nowhere/model", "/nowhere/model: no such file or folder"),
        ("model.gguf", "model.gguf: no such file or folder"),
        ("not-a-hub-name", "not-a-hub-name: no such file or folder"),
        ("~nobody-at-all/x", "~nobody-at-all/x: no such file or folder"),
        ("x" * 5000, "no such file or folder"),
        ("org/" + "x" * 5000, "no such file or folder"),
        ("nobody/has-this", "not in the local cache (HF_HOME); the hub is not asked"),
    ],
)
def test_model_that_is_nowhere(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    failure = failure_of(name)
    assert failure.failure_class is FailureClass.MODEL_LOAD_FAILED
    assert said in failure.message


def answer(status: int) -> HfHubHTTPError:
    request = httpx2.Request("GET", "https://hub.invalid/api/models/org/tiny")
    response = httpx2.Response(status, request=request)
    kind = RepositoryNotFoundError if status == 401 else HfHubHTTPError
    return kind(f"{status} for url", response=response)


def nothing_local(cause: Exception) -> LocalEntryNotFoundError:
    error = LocalEntryNotFoundError("no snapshot folder")
    error.__cause__ = cause
    return error


def try_hub(monkeypatch: pytest.MonkeyPatch, *outcomes: Exception | str) -> tuple[Any, list[float]]:
    """What resolving gives when the tries end so (the last one for good), and the pauses."""
    pauses: list[float] = []
    left = list(outcomes)

    def download(name: str, **options: Any) -> str:
        outcome = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(outcome, str):
            return outcome
        raise outcome

    monkeypatch.setattr("plimsoll_engine.models.source.snapshot_download", download)
    monkeypatch.setattr("plimsoll_engine.models.source.time.sleep", pauses.append)
    try:
        return resolve_model("org/tiny", "v1"), pauses
    except EngineFailure as failure:
        return failure, pauses


UNREACHABLE = {
    "no connection": httpx2.ConnectError("Name or service not known"),
    "no connection, nothing in the cache": nothing_local(httpx2.ConnectTimeout("timed out")),
    "cut off while downloading": httpx2.ReadError("connection reset"),
    "hub is down": nothing_local(answer(503)),
    "too many requests": answer(429),
}
REFUSED = {
    "no such repository": answer(401),
    "no such revision": answer(404),
    "no access": nothing_local(answer(403)),
}


@pytest.mark.parametrize("what", UNREACHABLE)
def test_hub_that_cannot_be_reached_is_tried_for_a_while(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failure, pauses = try_hub(monkeypatch, UNREACHABLE[what])
    assert failure.failure_class is FailureClass.MODEL_LOAD_FAILED
    assert failure.figures == {"hub": "unreachable"}
    assert "org/tiny at revision v1: the hub cannot be reached" in failure.message
    assert len(pauses) == 3
    assert sum(pauses) <= 120
    assert caplog.text.count("the hub cannot be reached") == 3


def test_hub_that_comes_back_is_used(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, pauses = try_hub(monkeypatch, UNREACHABLE["no connection"], str(saved))
    assert source == ModelSource(saved, None, saved.name)
    assert len(pauses) == 1


@pytest.mark.parametrize("what", REFUSED)
def test_name_that_the_hub_refuses_is_not_tried_again(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure, pauses = try_hub(monkeypatch, REFUSED[what])
    assert failure.failure_class is FailureClass.MODEL_LOAD_FAILED
    assert failure.figures == {"hub": "refused"}
    assert "does not exist on the hub, or there is no access" in failure.message
    assert not pauses


@pytest.mark.parametrize(
    ("error", "hub"),
    [
        (nothing_local(OfflineModeIsEnabled("offline")), {"hub": "offline"}),
        (OSError(28, "No space left on device"), {}),
    ],
)
def test_trouble_that_no_other_try_can_help_is_told_at_once(
    error: Exception, hub: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failure, pauses = try_hub(monkeypatch, error)
    assert failure.failure_class is FailureClass.MODEL_LOAD_FAILED
    assert failure.figures == hub
    assert not pauses


def test_file_that_is_no_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"abc")
    assert "a file must be a .gguf file" in failure_of(tmp_path / "model.bin").message
    (tmp_path / "model.gguf").write_bytes(b"not a GGUF file at all")
    failure = failure_of(tmp_path / "model.gguf")
    assert failure.failure_class is FailureClass.MODEL_LOAD_FAILED
    assert "cannot be read" in failure.message


def test_hub_name_is_found_in_the_cache_offline(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--org--tiny"
    shutil.copytree(saved, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    source = resolve_model("org/tiny")
    assert source == ModelSource(repository / "snapshots" / commit, None, commit)
    assert load("org/tiny").model.vocab_size == VOCAB_SIZE


def test_weights_in_several_files(model: Path, saved: Path) -> None:
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, model / file, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    prompts = [[1, 2, 3]]
    params = SamplingParams(max_tokens=4, temperature=0.0)
    results = [
        generate(load(folder), prompts, params, block_size=16)[0].token_ids
        for folder in (model, saved)
    ]
    assert results[0] == results[1]


# Case B18: a length beyond the model's positions.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


def test_b18_length_beyond_the_positions_is_refused(model: Path) -> None:
    change_config(model, max_position_embeddings=2048)
    failure = failure_of(model, max_model_len=8192)
    assert failure.failure_class is FailureClass.INVALID_CONFIGURATION
    assert failure.exit_status == 2
    assert "8192" in failure.message
    assert "2048" in failure.message
    assert failure.suggestion == {"flag": "--max-model-len", "value": 2048}


def test_b18_ceiling_is_the_positions_however_much_memory_there_is(model: Path) -> None:
    change_config(model, max_position_embeddings=2048)
    assert load_model_config(ModelSource(model)).max_model_len == 2048


def test_b18_scaled_positions_are_accepted_and_finite_to_the_last(model: Path) -> None:
    change_config(model, max_position_embeddings=2048, rope_parameters=None, rope_scaling=YARN)
    runner = load(model, max_model_len=8192)
    assert runner.model.max_model_len == 8192
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)
    [result] = generate(runner, [[7] * 8191], params, block_size=16)
    assert torch.tensor(result.samples[0].logprobs[0].logprob).isfinite()


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("mistral", {"sliding_window": 96}, (96, 96, 96)),
        # No sequence outgrows it.
        ("mistral", {"sliding_window": 512}, (None, None, None)),
        # transformers' Llama does not read it.
        ("llama", {"sliding_window": 96}, (None, None, None)),
        ("qwen2", {"sliding_window": 96, "layer_types": None}, (None, None, None)),
        (
            "qwen2",
            {
                "sliding_window": 96,
                "use_sliding_window": True,
                "max_window_layers": 1,
                "layer_types": None,
            },
            (None, 96, 96),
        ),
        (
            "qwen3",
            {
                "sliding_window": 96,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (96, None, 96),
        ),
    ],
)
def test_window_is_the_layers_and_does_not_bound_the_length(
    tmp_path: Path, family: str, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    save_tiny_model(FAMILIES[family], tmp_path)
    change_config(tmp_path, **changes)
    config = load_model_config(ModelSource(tmp_path))
    assert config.sliding_windows == windows
    assert config.max_model_len == 512


@pytest.mark.parametrize(
    "layer_types", [["full_attention"] * 2 + ["chunked_attention"], ["full_attention"] * 2, "full"]
)
def test_layer_types_that_are_not_supported_are_refused(tmp_path: Path, layer_types: Any) -> None:
    save_tiny_model(FAMILIES["qwen3"], tmp_path)
    change_config(tmp_path, layer_types=layer_types)
    with pytest.raises(EngineFailure, match="layer_types"):
        load_model_config(ModelSource(tmp_path))


@pytest.mark.parametrize(
    ("kind", "used", "failure_class"),
    [
        ("cuda", 3072 * MIB, FailureClass.DEVICE_BUSY_AT_START),
        # What is in use is the engine's own: it is the model that is too large.
        ("cuda", 1024 * MIB, FailureClass.MODEL_TOO_LARGE),
        ("cpu", 3072 * MIB, FailureClass.MODEL_TOO_LARGE),
    ],
)
def test_a_device_that_others_hold_is_busy_and_the_model_not_too_large(
    saved: Path, kind: str, used: int, failure_class: FailureClass
) -> None:
    served, dtype = load_served_model(ModelSource(saved)), torch.float32
    total = used + weight_bytes(served, dtype, 0, 1, "cpu") // 2
    config = EngineConfig(model=str(saved))
    with pytest.raises(EngineFailure) as caught:
        check_weights_fit(config, served, dtype, kind, 1, local_size=1, total=total, used=used)
    assert caught.value.failure_class is failure_class
    assert caught.value.figures["total_bytes"] == total


def test_model_larger_than_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """The figure that the message suggests works."""
    # 64 MiB in the embeddings: the file itself is not even needed for the refusal.
    config = type(FAMILIES["llama"])(
        **{**FAMILIES["llama"].to_dict(), "vocab_size": 64 * MIB // (4 * 128)}
    )
    save_tiny_model(config, tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.rename(tmp_path / "aside")
    small = host_memory.used_bytes() + 32 * MIB
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 8}
    failure = failure_of(tmp_path, device_memory=small, **settings)
    assert failure.failure_class is FailureClass.MODEL_TOO_LARGE
    assert failure.phase is Phase.LOAD
    assert int(failure.figures["weights_bytes"]) > 128 * MIB
    assert failure.figures["total_bytes"] == small
    assert failure.suggestion is not None
    assert failure.suggestion["flag"] == "memory"
    suggested = int(failure.suggestion["value"])
    assert str(suggested) in failure.message

    (tmp_path / "aside").rename(weights)
    runner = load(tmp_path, device_memory=suggested, **settings)
    figures = runner.profile(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=512)
    room = int(0.9 * suggested) - figures.weights - figures.activations - figures.runtime
    assert room >= 512 // 16 * figures.bytes_per_block


def test_step_that_does_not_fit_is_told_of_and_not_tried(saved: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "support.tight_memory", str(saved)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        check=True,
    )
    failed = json.loads(ended.stdout)
    assert failed["class"] == FailureClass.DEVICE_OOM_AT_START
    assert failed["phase"] == Phase.PROFILE
    assert failed["flag"] == "--max-num-batched-tokens"
    assert failed["peak"] < failed["total"]
