"""The model's tokenizer, its end tokens and the sampling defaults its authors recommend.

In: the configuration's ``model`` and ``revision``. Out: a :class:`ModelTokenizer`. The tokenizer is
transformers'; chat templates are applied by it. This module knows neither requests nor weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from plimsoll_engine.config import EngineConfig
from plimsoll_engine.models.source import ModelSource, load_failure, read_json, resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class ModelTokenizer:
    tokenizer: PreTrainedTokenizerBase
    # Generation ends at any of these: generation_config.json's, config.json's, the tokenizer's.
    eos_token_ids: frozenset[int]
    # From generation_config.json: only the keys that are set there.
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    # Commit that a hub name resolved to; None for local files.
    revision: str | None = None


def load_tokenizer(config: EngineConfig) -> ModelTokenizer:
    """Raises EngineFailure ModelLoadFailed when there is no usable tokenizer."""
    source = resolve_model(config.model, config.revision)
    # Imports torch, which takes seconds: a model that is not there should not wait for that.
    from transformers import AutoTokenizer

    options: dict[str, Any] = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.folder, **options)
    # transformers raises whatever its parsers raise (KeyError, ValueError, OSError, TypeError...).
    except Exception as error:
        where = source.gguf_path or source.folder
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise load_failure(f"the tokenizer in {where} cannot be loaded: {lines[0]}") from error
    generation = read_json(source, "generation_config.json")
    ends = {tokenizer.eos_token_id}
    for document in (generation, read_json(source, "config.json")):
        ends |= _end_ids(document, source)
    return ModelTokenizer(
        tokenizer=tokenizer,
        eos_token_ids=frozenset(end for end in ends if end is not None),
        sampling_defaults={
            name: generation[name]
            for name in _SAMPLING_DEFAULTS
            if isinstance(generation.get(name), int | float)
        },
        revision=source.revision,
    )


def _end_ids(document: dict[str, Any], source: ModelSource) -> set[int]:
    value = document.get("eos_token_id")
    ends = value if isinstance(value, list) else [value]
    for end in ends:
        if end is not None and type(end) is not int:
            raise load_failure(f"{source.folder}: eos_token_id {value!r} is no token id or list")
    return {end for end in ends if end is not None}
