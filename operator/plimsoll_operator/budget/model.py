"""The sizes of a model, read from the text of its config.json.

In: the parsed JSON. Out: a :class:`ModelShape`, or InvalidModel naming the field, its value and
what is allowed. What is left out there has the default of transformers' configuration classes. Reads
no weights and imports no framework.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]

_MAX_COUNT = 2**31 - 1
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_DTYPES = ", ".join(DTYPE_BYTES)
# With these, max_position_embeddings already is the extended length.
_ROPE_WITH_OWN_LENGTH = ("default", "llama3")
_ROPE_SCALED = ("linear", "yarn")


class InvalidModel(ValueError):
    """A config.json that no budget can be made from."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} is {value}; allowed: {allowed}")
        self.field = field


class UnknownFamily(InvalidModel):
    """The engine may serve it, in transformers' own code, and measure it then: nothing here says
    how large its parts are."""

    def __init__(self, model_type: object) -> None:
        super().__init__("model_type", model_type, ", ".join(FAMILIES))


@dataclass(frozen=True)
class _Family:
    """What a model_type says without a field: transformers' defaults, and biases in its code."""

    architecture: str
    num_kv_heads: int | None
    head_size: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False


FAMILIES = {
    "llama": _Family("LlamaForCausalLM", num_kv_heads=None),
    "mistral": _Family("MistralForCausalLM", num_kv_heads=8),
    "qwen2": _Family("Qwen2ForCausalLM", num_kv_heads=32, qkv_bias=True),
    "qwen3": _Family("Qwen3ForCausalLM", num_kv_heads=32, head_size=128, qk_norm=True),
}


@dataclass(frozen=True)
class ModelShape:
    """``max_model_len`` is the longest sequence that the positions allow, in tokens; ``dtype`` what
    the weights are stored in."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    max_model_len: int
    dtype: str


def read_model_shape(config: object) -> ModelShape:
    """Raises InvalidModel."""
    if not isinstance(config, dict):
        raise InvalidModel("config.json", type(config).__name__, "a JSON object")
    family = _family(config)
    if config.get("quantization_config"):
        raise InvalidModel("quantization_config", "set", "unquantized weights")
    heads = _count(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads", family.num_kv_heads or heads)
    if heads % kv_heads:
        allowed = f"a multiple of num_key_value_heads ({kv_heads})"
        raise InvalidModel("num_attention_heads", heads, allowed)
    hidden = _count(config, "hidden_size")
    attention_bias = _flag(config, "attention_bias")
    return ModelShape(
        architecture=family.architecture,
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_count(config, "intermediate_size"),
        num_layers=_count(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=_count(config, "head_dim", family.head_size or max(1, hidden // heads)),
        tied_embeddings=_flag(config, "tie_word_embeddings"),
        qkv_bias=attention_bias or family.qkv_bias,
        output_bias=attention_bias,
        mlp_bias=_flag(config, "mlp_bias"),
        qk_norm=family.qk_norm,
        max_model_len=_max_model_len(config, family),
        dtype=_dtype(config),
    )


def _family(config: Json) -> _Family:
    model_type, named = config.get("model_type"), config.get("architectures")
    if model_type not in FAMILIES:
        raise UnknownFamily(model_type or "missing")
    known = [family.architecture for family in FAMILIES.values()]
    for name in named if isinstance(named, list) else ():
        if name not in known:
            raise InvalidModel("architectures", name, ", ".join(known))
    return FAMILIES[model_type]


def _count(config: Json, field: str, default: int | None = None) -> int:
    value = config.get(field)
    if value is None:
        value = default
    if type(value) is not int or not 1 <= value <= _MAX_COUNT:
        shown = "missing" if value is None else repr(value)
        raise InvalidModel(field, shown, f"a whole number from 1 to {_MAX_COUNT}")
    return value


def _flag(config: Json, field: str) -> bool:
    value = config.get(field)
    if value is not None and not isinstance(value, bool):
        raise InvalidModel(field, repr(value), "true or false")
    return bool(value)


def _dtype(config: Json) -> str:
    """float32 when the file does not say: that is what transformers makes of it."""
    value = config.get("dtype", config.get("torch_dtype"))
    if value is None:
        return "float32"
    name = str(value).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise InvalidModel("torch_dtype", value, _DTYPES)
    return name


def _max_model_len(config: Json, family: _Family) -> int:
    length = _count(config, "max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise InvalidModel("rope_scaling", rope, "a JSON object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in _ROPE_SCALED:
        # yarn is configured either with the extended or with the original length as
        # max_position_embeddings; its own key says what the factor applies to.
        original = rope.get("original_max_position_embeddings") or length
        factor = rope.get("factor") or 1.0
        if not isinstance(original, int) or not isinstance(factor, int | float) or factor <= 0:
            raise InvalidModel("rope_scaling", rope, "a positive factor of a whole length")
        length = max(length, math.floor(original * factor))
    elif kind not in _ROPE_WITH_OWN_LENGTH:
        allowed = ", ".join((*_ROPE_WITH_OWN_LENGTH, *_ROPE_SCALED))
        raise InvalidModel("rope_scaling.rope_type", kind, allowed)
    return length
