"""The prepared model is found when it is whole, and its objects bind to each other."""

import subprocess
import sys
from pathlib import Path

import pytest

from plimsoll_local import models
from plimsoll_local.binaries import cache_home


def test_an_empty_home_has_no_model(tmp_path: Path) -> None:
    assert models.find_prepared(tmp_path) is None


def test_a_half_made_snapshot_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "hub/models--HuggingFaceTB--SmolLM2-135M-Instruct/.making-x").mkdir(parents=True)
    assert models.find_prepared(tmp_path) is None


def test_the_claim_and_the_volume_name_each_other(tmp_path: Path) -> None:
    volume, claim = models.build_volume(tmp_path, "default")
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    reference = volume["spec"]["claimRef"]
    assert (reference["namespace"], reference["name"]) == ("default", claim["metadata"]["name"])
    assert volume["spec"]["hostPath"]["path"] == str(tmp_path)
    assert volume["spec"]["capacity"] == claim["spec"]["resources"]["requests"]


@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_expanded_model_loads_by_its_hub_name_and_knows_paris(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The one of all tests and the demo: expanded here where it is not yet.
    home = cache_home() / "models"
    prepared = models.ensure_prepared(home, lambda line: None)
    assert models.find_prepared(home) is not None
    assert models.ensure_prepared(home, lambda line: None).seconds is None
    assert "4-bit weights expanded" in (prepared.snapshot / "README.md").read_text()
    # In a process of its own, because the hub's place and offline mode are read at import.
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    script = f"""
from transformers import AutoModelForCausalLM, AutoTokenizer
name = {prepared.name!r}
model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
question = [{{"role": "user", "content": "What is the capital of France?"}}]
prompt = tokenizer.apply_chat_template(
    question, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
tokens = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0]
print(tokenizer.decode(tokens[prompt["input_ids"].shape[1]:], skip_special_tokens=True))
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "The capital of France is Paris."
