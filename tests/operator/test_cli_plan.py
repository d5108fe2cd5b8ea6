"""`kubectl plimsoll plan`: manifests in, children, steps and byte budgets out; no cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll_operator.cli.app import ENGINE_IMAGE, run
from plimsoll_operator.cli.definitions import (
    find_mistakes,
    missing_fields,
    own_definitions,
    schema_of,
)
from plimsoll_operator.cli.errors import UsageError
from plimsoll_operator.cli.sizing import parse_size
from plimsoll_operator.controller import DEFAULT_ENGINE_IMAGE
from support.model_configs import LLAMA_3_70B, MODEL_CONFIGS

Json = dict[str, Any]
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "manifests" / "llmdeployment.yaml"


def manifest(folder: Path, **spec: Any) -> str:
    """The issue's example: Llama-3-70B at tensor 4, blocks of 16, utilisation 0.90, length 8192."""
    body: Json = {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "llama", "namespace": "prod"},
        "spec": {
            "model": {"uri": "hf://meta-llama/Meta-Llama-3-70B-Instruct"},
            "replicas": 2,
            "parallelism": {"tensor": 4},
            "engine": {"blockSize": 16, "gpuMemoryUtilization": 0.90, "maxModelLen": 8192},
            **spec,
        },
    }
    path = folder / "llama.yaml"
    path.write_text(yaml.safe_dump(body))
    return str(path)


@pytest.fixture
def config(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3_70B))
    return str(folder)


def plan(*arguments: str) -> int:
    return run(["plan", *arguments])


def test_the_example_of_four_cards_is_checked_on_a_laptop(
    tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = plan("-f", manifest(tmp_path), "--model-config", config, "--gpu", "H100-80G")
    text = capsys.readouterr().out
    assert code == 0
    assert "LLMDeployment prod/llama: 2 replicas of 4 x nvidia.com/gpu" in text
    for child in ("Secret", "ConfigMap", "Service", "PodDisruptionBudget", "StatefulSet"):
        assert child in text
    assert "nothing is there yet            Rolling: 2 pods" in text
    assert "weights        32.86 GiB" in text
    assert "exact: bfloat16, 1 of 4 shards: embedding 501.00 MiB, lm_head 501.00 MiB" in text
    assert "estimated from above for a step of 2048 tokens" in text
    assert "KV cache per token 80.00 KiB, per block 1.25 MiB: 2 of 8 KV heads" in text
    assert "largest that fits 8192 (the model's positions allow 8192)" in text
    assert "Verdict: fits: 57.2 requests of 8192 tokens at once, in 29273 blocks" in text


def test_the_same_as_json(tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("-f", manifest(tmp_path), "--model-config", config, "--gpu-memory", "80GB")
    assert plan(*arguments, "-o", "json") == 0
    (document,) = json.loads(capsys.readouterr().out)
    budget = document["budget"]
    assert budget["deviceBytes"] == 80_000_000_000
    assert budget["bytesPerBlock"] == 16 * budget["bytesPerToken"] == 1310720
    assert sum(budget["weightsBytesByPart"].values()) == budget["weightsBytes"]
    fixed = ("weightsBytes", "activationsBytesEstimated", "runtimeBytesEstimated")
    assert sum(budget[part] for part in (*fixed, "kvCacheBytes", "marginBytes")) == 80_000_000_000
    assert document["verdict"]["fits"] is True
    reasons = [step["reason"] for step in document["rollout"]]
    assert reasons == ["Rolling", "Settled", "Canary", "GivenUp"]


# Status 1, a verdict that says why, and the nearest setting that works.
@pytest.mark.parametrize(
    ("spec", "gpu_memory", "says"),
    [
        (
            {"parallelism": {"tensor": 1}},
            "80GiB",
            "spread a replica over 2 accelerators (spec.parallelism.tensor)",
        ),
        ({}, "40GiB", "lower the length to"),
        (
            {"parallelism": {"tensor": 3}},
            "80GiB",
            "spec.parallelism.tensor is 3; allowed: 1, 2, 4, 8, 16, 32, 64",
        ),
        (
            {"engine": {"maxModelLen": 9000}},
            "80GiB",
            "spec.engine.maxModelLen is 9000; allowed: at most 8192",
        ),
    ],
)
def test_what_does_not_fit_says_what_would(
    spec: Json,
    gpu_memory: str,
    says: str,
    tmp_path: Path,
    config: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = manifest(tmp_path, **spec)
    assert plan("-f", file, "--model-config", config, "--gpu-memory", gpu_memory) == 1
    assert says in capsys.readouterr().out


def test_ranks_beyond_the_kv_heads_hold_copies(
    tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = manifest(tmp_path, parallelism={"tensor": 16})
    assert plan("-f", file, "--model-config", config, "--gpu", "A100-80G") == 0
    assert "1 of 8 KV heads, each KV head held by 2 ranks" in capsys.readouterr().out


def test_on_cpu_the_container_is_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL_CONFIGS["smollm2-135m"]))
    assert plan("-f", str(EXAMPLE), "--model-config", str(path)) == 0
    text = capsys.readouterr().out
    assert "exact: float32, all" in text
    assert "(lm_head is the embedding)" in text
    assert "1.50 GiB  100.0 %  spec.resources.limits.memory" in text
    assert "Verdict: fits" in text


def test_a_model_that_is_here_needs_no_option(
    tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = manifest(tmp_path, model={"uri": f"file://{config}"})
    assert plan("-f", file, "--gpu", "H200-141G") == 0
    assert "Verdict: fits" in capsys.readouterr().out


def test_without_sizes_or_memory_there_is_no_budget(
    tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan("-f", manifest(tmp_path)) == 0
    assert "unknown without the model's sizes: give --model-config" in capsys.readouterr().out
    assert plan("-f", manifest(tmp_path), "--model-config", config) == 0
    assert "unknown without the device's memory: give --gpu-memory" in capsys.readouterr().out


def test_the_children_as_yaml_are_those_of_the_operator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan("-f", manifest(tmp_path), "-o", "yaml") == 0
    children = {body["kind"]: body for body in yaml.safe_load_all(capsys.readouterr().out)}
    container = children["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == ENGINE_IMAGE
    assert "--tensor-parallel-size=4" in container["args"]
    assert set(children["Secret"]["data"].values()) == {""}


def test_the_engine_image_is_the_operators_default() -> None:
    assert ENGINE_IMAGE == DEFAULT_ENGINE_IMAGE


# Status 2, one line or a few, no traceback.
@pytest.mark.parametrize(
    ("text", "arguments", "says"),
    [
        (None, (), "cannot be read: No such file or directory"),
        ("{", (), "is no YAML"),
        ("kind: Pod\napiVersion: v1\n", (), "has no LLMDeployment; it has Pod"),
        ("", (), "has no LLMDeployment; it has nothing"),
        ("{spec: {replicas: many}}", (), "spec.replicas: 'many' is not of type 'integer'"),
        ("{spec: {modle: {}}}", (), "'modle' was unexpected"),
        ("{spec: {engine: {blockSize: 0}}}", (), "spec.engine.blockSize: 0 is"),
        ("{metadata: {labels: {}}}", (), "metadata.name is missing"),
        ("{spec: {drain: 5parsecs}}", (), "spec.drain is 5parsecs; allowed: a duration"),
        ("{}", ("--gpu", "H900"), "--gpu is H900; allowed: A10-24G"),
        ("{}", ("--gpu-memory", "much"), "--gpu-memory is much; allowed: a size"),
        ("{}", ("--gpu", "T4-16G", "--gpu-memory", "1GiB"), "give one of them"),
        ("{}", ("--model-config", "nowhere.json"), "no such file; allowed: a config.json"),
        (
            "{spec: {accelerator: {resourceName: ''}}}",
            ("--gpu", "T4-16G"),
            "on CPU the memory is spec.resources.limits.memory",
        ),
    ],
)
def test_bad_input_is_named(
    text: str | None,
    arguments: tuple[str, ...],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "file.yaml"
    if text is not None:
        path.write_text(patched(text))
    assert plan("-f", str(path), *arguments) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert printed.out == ""


def patched(text: str) -> str:
    """A good manifest with ``{field: ...}`` merged in; other text as it is."""
    try:
        changes = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if not isinstance(changes, dict) or "kind" in changes:
        return text
    spec = {"model": {"uri": "hf://org/tiny"}, **changes.get("spec", {})}
    body = {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": changes.get("metadata", {"name": "one"}),
        "spec": spec,
    }
    return yaml.safe_dump(body)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"hidden_size": None}, "hidden_size is missing"),
    ],
)
def test_a_model_that_cannot_be_sized_is_bad_input(
    change: Json, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA_3_70B, **change}))
    arguments = ("--model-config", str(path), "--gpu", "H100-80G")
    assert plan("-f", manifest(tmp_path), *arguments) == 2
    assert says in capsys.readouterr().err


def test_a_model_that_only_the_engine_can_measure_is_planned_without_a_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA_3_70B, "model_type": "gpt2"}))
    arguments = ("--model-config", str(path), "--gpu", "H100-80G")
    assert plan("-f", manifest(tmp_path), *arguments) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "model_type is gpt2; allowed: llama, mistral, qwen2, qwen3" in said
    assert "The engine measures what others take at start" in said


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30),
        ("80Gi", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("80g", 80 * 10**9),
        ("79.5 GiB", 79.5 * 2**30),
        ("24576MiB", 24 * 2**30),
        ("1024", 1024),
    ],
)
def test_sizes(text: str, size: float) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "80 apples", "-1GiB", "GiB", "0"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="--gpu-memory is"):
        parse_size(text)


def test_every_example_is_valid_by_the_packaged_definition() -> None:
    schema = schema_of(own_definitions()["llmdeployments.plimsoll.dev"], "v1alpha1")
    assert schema is not None
    examples = sorted((ROOT / "manifests").glob("llmdeployment*.yaml"))
    assert examples
    for path in examples:
        for body in yaml.safe_load_all(path.read_text()):
            assert find_mistakes(body, schema) == []


def test_missing_fields_are_told_apart() -> None:
    wanted = {
        "properties": {"a": {"properties": {"b": {}}}, "c": {"items": {"properties": {"d": {}}}}}
    }
    found: Json = {"properties": {"a": {}, "c": {"items": {}}}}
    assert missing_fields(wanted, found) == ["a.b", "c[].d"]
    assert missing_fields(found, wanted) == []


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("vllm/vllm-openai:v0.11.0", "vLLM 0.11.0 behind the gate"),
        ("vllm/vllm-openai:latest", "vLLM of unknown version"),
    ],
)
def test_a_plan_for_vllm_says_what_moves(
    tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str], image: str, said: str
) -> None:
    file = manifest(tmp_path, runtime={"name": "VLLM", "image": image})
    assert plan("-f", file, "--model-config", config, "--gpu", "H100-80G") == 0
    text = capsys.readouterr().out
    assert said in text
    assert "vLLM measures activations at its start" in text
    assert plan("-f", file, "-o", "yaml") == 0
    children = list(yaml.safe_load_all(capsys.readouterr().out))
    (template,) = [b["spec"]["template"]["spec"] for b in children if b["kind"] == "StatefulSet"]
    assert [c["name"] for c in template["initContainers"]] == ["engine"]
    assert [c["name"] for c in template["containers"]] == ["gate"]
