"""What config.json alone can refuse, and that it takes no torch to do it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plimsoll_engine.config import EngineConfig
from plimsoll_engine.models.preview import check_settings
from plimsoll_engine.termination import EngineFailure, FailureClass

MODEL = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2048}
YARN = {"rope_type": "yarn", "factor": 4.0}


def settings(folder: Path, model: Any, **flags: Any) -> EngineConfig:
    (folder / "config.json").write_text(json.dumps(model))
    return EngineConfig(model=str(folder), **flags)


@pytest.mark.parametrize(
    ("flags", "flag", "value"),
    [
        ({"max_model_len": 2049}, "--max-model-len", 2048),
        ({"tensor_parallel_size": 3}, "--tensor-parallel-size", 2),
        ({"tensor_parallel_size": 128}, "--tensor-parallel-size", 8),
    ],
)
def test_what_the_model_cannot_do_is_refused_with_what_it_can(
    tmp_path: Path, flags: dict[str, Any], flag: str, value: int
) -> None:
    with pytest.raises(EngineFailure) as refused:
        check_settings(settings(tmp_path, MODEL, **flags))
    assert refused.value.failure_class is FailureClass.INVALID_CONFIGURATION
    assert refused.value.exit_status == 2
    assert refused.value.suggestion == {"flag": flag, "value": value}


@pytest.mark.parametrize(
    "model",
    [
        MODEL | {"rope_parameters": YARN},
        MODEL | {"rope_scaling": YARN},
        MODEL | {"rope_scaling": "odd"},
        MODEL | {"max_position_embeddings": "x", "num_attention_heads": 0},
        MODEL | {"max_position_embeddings": 1 << 40, "num_attention_heads": 1 << 40},
        {},
        [],
    ],
)
def test_what_config_json_does_not_tell_for_sure_is_left_to_the_loader(
    tmp_path: Path, model: Any
) -> None:
    check_settings(settings(tmp_path, model, max_model_len=4096))


def test_no_torch_is_imported_for_it() -> None:
    code = "import sys, plimsoll_engine.models.preview; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
