"""A model's sizes from its config.json, by the operator's own reckoning. In: a path, a name. Out: a
:class:`Model`. Only what one device holds whole: no tensor parallelism.
"""

from __future__ import annotations

import json
from pathlib import Path

from plimsoll_operator.budget.memory import Setup, build_budget
from plimsoll_operator.budget.model import DTYPE_BYTES, InvalidModel, read_model_shape
from plimsoll_simulator.hardware import BLOCK_SIZE, Model


class ModelError(ValueError):
    """No sizes of a model; the message names file and field."""


def read_model(path: Path, name: str) -> Model:
    """Raises ModelError, or OSError for what cannot be read."""
    try:
        shape = read_model_shape(json.loads(path.read_text(encoding="utf-8")))
    except (InvalidModel, ValueError) as error:
        raise ModelError(f"{path}: {error}") from error
    # Weights and bytes per token follow from the sizes alone; the rest of the budget is not used.
    setup = Setup(
        device=1,
        tensor_parallel_size=1,
        block_size=BLOCK_SIZE,
        utilization=1.0,
        max_model_len=None,
        max_num_batched_tokens=1,
    )
    budget = build_budget(shape, setup)
    return Model(
        name=name,
        parameters=budget.weight_bytes / DTYPE_BYTES[budget.dtype],
        weight_bytes=budget.weight_bytes,
        kv_bytes_per_token=budget.bytes_per_token,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        native_length=shape.max_model_len,
    )
