"""What the model's config.json says of settings, before torch and transformers are imported.

In: the settings. Out: nothing, or an EngineFailure within the second. Only what is beyond doubt is
refused here: whatever the file leaves to transformers is checked again when the model is loaded.
"""

from __future__ import annotations

from typing import Any

from plimsoll_engine.config import EngineConfig
from plimsoll_engine.memory import check_length
from plimsoll_engine.models.source import read_json, resolve_model
from plimsoll_engine.parallel.shard import check_size

# Heads are counted through one by one.
_MAX_HEADS = 1 << 16


def check_settings(config: EngineConfig) -> None:
    """Raises EngineFailure; ModelLoadFailed when there is no model."""
    document = read_json(resolve_model(config.model, config.revision), "config.json")
    heads = _count(document, "num_attention_heads")
    kv_heads = _count(document, "num_key_value_heads")
    if heads and kv_heads and max(heads, kv_heads) <= _MAX_HEADS:
        check_size(heads, kv_heads, config.tensor_parallel_size)
    length = stated_length(document)
    if length is not None:
        check_length(length, config.max_model_len)


def stated_length(document: dict[str, Any]) -> int | None:
    """The model's longest sequence, where config.json alone tells it: without scaled positions."""
    rope = document.get("rope_parameters") or document.get("rope_scaling") or {}
    is_plain = isinstance(rope, dict) and rope.get("rope_type", rope.get("type", "default")) in (
        "default",
        "llama3",
    )
    if not is_plain:
        return None
    return _count(document, "max_position_embeddings")


def _count(document: dict[str, Any], key: str) -> int | None:
    value = document.get(key)
    return value if type(value) is int and value >= 1 else None
