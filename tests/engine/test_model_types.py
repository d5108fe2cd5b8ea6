"""docs/model-types.md: every causal LM type of the locked transformers, once, and a true verdict."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/model-types.md").read_text()


def verdicts() -> dict[str, list[str]]:
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(int(number) == len(types.split(", ")) for _, number, types in cells)
    return {verdict: types.split(", ") for verdict, _, types in cells}


@pytest.fixture(scope="module")
def census() -> ModuleType:
    spec = importlib.util.spec_from_file_location("model_census", ROOT / "tools/model_census.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_type_is_there_once() -> None:
    assert f"transformers {version('transformers')}," in PAGE
    listed = [each for types in verdicts().values() for each in types]
    assert sorted(listed) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    total = f"Of the {len(listed)} causal LM types"
    assert total in PAGE
    assert f"{len(verdicts()['served'])} are served" in PAGE


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen3", "gemma2", "gpt2", "bert", "bloom", "mamba", "gpt_oss"]
)
def test_a_verdict_is_that_of_the_engine(census: ModuleType, model_type: str) -> None:
    """One or two of each kind; all of them take minutes."""
    judged = census.judge(model_type)[1] or "served"
    assert model_type in verdicts()[judged]
