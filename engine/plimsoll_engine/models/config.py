"""What the decoder needs to know of a model, read from its configuration files.

In: a :class:`ModelSource`. Out: a frozen :class:`ModelConfig`, or an EngineFailure that names what
is not supported and what is. Parsing and the rotary frequencies are transformers' own, so that the
numbers are the same as there. This module reads no weights and knows no device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from plimsoll_engine.models.source import ModelSource, load_failure, read_json
from plimsoll_engine.parallel.shard import Shard, divide

# model_type of the configuration -> architecture.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# With these, max_position_embeddings already is the extended length.
_ROPE_TYPES_WITH_OWN_LENGTH = ("default", "llama3")
# Llama has no window, whatever its file says.
_WINDOW_FAMILIES = ("mistral", "qwen2", "qwen3")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "head_dim",
    "sliding_window",
)
_MAX_COUNT = 2**31 - 1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LayerAttention:
    """How one layer weighs the keys of the tokens before."""

    # Factor on the products of query and key.
    scale: float
    # Positions that a token sees, its own included; None: all.
    sliding_window: int | None = None
    # A scaled score s becomes soft_cap * tanh(s / soft_cap); None: it stays.
    soft_cap: float | None = None


@dataclass(frozen=True)
class ModelConfig:
    architecture: str
    # Rows of the output embedding.
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    # RMS norm of each query and key head (Qwen3).
    qk_norm: bool
    # Longest sequence that the positions allow, rope scaling taken into account.
    max_model_len: int
    # Of each layer: how many positions a token sees, its own included; None where it sees all.
    sliding_windows: tuple[int | None, ...]
    # Rotary frequencies (head_size / 2 of them) and the factor on cos and sin.
    inverse_frequencies: tuple[float, ...]
    rope_factor: float
    # What the weights are stored in; float32 when the configuration does not say.
    stored_dtype: str

    @property
    def attention(self) -> tuple[LayerAttention, ...]:
        scale = self.head_size**-0.5
        return tuple(LayerAttention(scale, window) for window in self.sliding_windows)

    def shard(self, rank: int, size: int) -> Shard:
        return divide(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            rank=rank,
            size=size,
        )


@dataclass(frozen=True)
class TransformersConfig:
    """Of a model that runs in transformers' own code; see ``transformers_trial``."""

    architecture: str
    vocab_size: int
    hidden_size: int
    # Of the widest feed-forward layer, as far as the configuration says.
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    num_parameters: int
    # Longest sequence that the positions allow, without extension.
    max_model_len: int
    attention: tuple[LayerAttention, ...]
    # What the weights are stored in; float32 when the configuration does not say.
    stored_dtype: str
    hf_config: Any = field(repr=False, compare=False)


def load_hf_config(source: ModelSource) -> Any:
    """transformers' own form of the configuration. Raises EngineFailure ModelLoadFailed for a file
    that cannot be read."""
    # Before transformers, which divides by some of them.
    _check_counts(read_json(source, "config.json"))
    try:
        return AutoConfig.from_pretrained(
            source.folder,
            trust_remote_code=False,
            **({"gguf_file": source.gguf_file} if source.gguf_file else {}),
        )
    # transformers raises whatever its parsers raise (KeyError, ValueError, OSError, TypeError...).
    except Exception as error:
        raise load_failure(
            f"the model's configuration in {source.gguf_path or source.folder} cannot be read: "
            f"{_first_line(error)}"
        ) from error


def load_model_config(source: ModelSource) -> ModelConfig:
    """Raises EngineFailure ModelLoadFailed for a file that cannot be read or a model that is not
    one of ARCHITECTURES as the decoder computes them."""
    return convert_config(load_hf_config(source))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _check_counts(settings: Mapping[str, object]) -> None:
    """What is not set has a default of transformers'."""
    for key in _COUNTS:
        value = settings.get(key)
        if value is not None and (type(value) is not int or not 1 <= value <= _MAX_COUNT):
            _refuse(key, repr(value), f"a whole number from 1 to {_MAX_COUNT}")


def _check_layer_types(hf_config: Any) -> None:
    """Only Qwen's files may have one per layer; transformers makes the list where they have none."""
    layer_types = getattr(hf_config, "layer_types", None)
    if layer_types is None:
        return
    if not isinstance(layer_types, list):
        _refuse("layer_types", repr(layer_types), "a list")
    for kind in layer_types:
        if kind not in _LAYER_TYPES:
            _refuse("layer_types entry", repr(kind), ", ".join(_LAYER_TYPES))
    if len(layer_types) != hf_config.num_hidden_layers:
        _refuse(
            "number of layer_types",
            len(layer_types),
            f"{hf_config.num_hidden_layers}, a layer each",
        )


def _refuse(what: str, value: object, allowed: object) -> None:
    raise load_failure(f"the model's {what} {value} is not supported; supported: {allowed}")


def convert_config(hf_config: Any) -> ModelConfig:
    model_type = hf_config.model_type
    supported = ", ".join(ARCHITECTURES.values())
    if model_type not in ARCHITECTURES:
        named = (getattr(hf_config, "architectures", None) or [model_type])[0]
        _refuse("architecture", named, supported)
    for named in getattr(hf_config, "architectures", None) or []:
        if named not in ARCHITECTURES.values():
            _refuse("architecture", named, supported)
    if hf_config.hidden_act != "silu":
        _refuse("activation", hf_config.hidden_act, "silu")
    if getattr(hf_config, "quantization_config", None):
        _refuse("weight format", "quantization_config", "unquantized safetensors, or GGUF")
    rope = hf_config.rope_parameters
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        _refuse("rope_type", rope["rope_type"], ", ".join(ROPE_TYPES))
    _check_counts(vars(hf_config))
    _check_layer_types(hf_config)
    for key, value in rope.items():
        # Factors may be lists (per dimension) in kinds of scaling that are refused above.
        # Older files have the kind as "type"; transformers keeps both.
        if key not in ("rope_type", "type") and isinstance(value, str):
            _refuse(key, repr(value), "a number")
    heads, kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
    if heads % kv_heads:
        _refuse("number of attention heads", heads, f"multiples of its {kv_heads} KV heads")

    try:
        inverse_frequencies, rope_factor = _rotary_frequencies(hf_config)
        max_model_len = _max_model_len(hf_config)
    # transformers' functions take what is there for granted (KeyError, TypeError, ValueError...).
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise load_failure(
            f"the model's rope_parameters {rope} cannot be used: {type(error).__name__}: {error}"
        ) from error
    attention_bias = bool(getattr(hf_config, "attention_bias", False))
    dtype = str(getattr(hf_config, "dtype", None) or torch.float32).removeprefix("torch.")
    return ModelConfig(
        architecture=ARCHITECTURES[model_type],
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.intermediate_size,
        num_layers=hf_config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=_head_size(hf_config),
        rms_norm_eps=hf_config.rms_norm_eps,
        tied_embeddings=hf_config.tie_word_embeddings,
        qkv_bias=attention_bias or model_type == "qwen2",
        output_bias=attention_bias,
        mlp_bias=bool(getattr(hf_config, "mlp_bias", False)),
        qk_norm=model_type == "qwen3",
        max_model_len=max_model_len,
        sliding_windows=_sliding_windows(hf_config, max_model_len),
        inverse_frequencies=tuple(inverse_frequencies.tolist()),
        rope_factor=rope_factor,
        stored_dtype=dtype if dtype in DTYPES else "float32",
    )


def _head_size(hf_config: Any) -> int:
    head_size: int | None = getattr(hf_config, "head_dim", None)
    return head_size or hf_config.hidden_size // hf_config.num_attention_heads


def _rotary_frequencies(hf_config: Any) -> tuple[torch.Tensor, float]:
    rope = hf_config.rope_parameters
    rope_type = rope.get("rope_type", "default")
    if rope_type != "default":
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](hf_config)
        return frequencies, float(factor)
    head_size = _head_size(hf_config)
    exponents = torch.arange(0, head_size, 2, dtype=torch.float) / head_size
    return 1.0 / (rope["rope_theta"] ** exponents), 1.0


def _max_model_len(hf_config: Any) -> int:
    rope = hf_config.rope_parameters
    rope_type = rope.get("rope_type", "default")
    length: int = hf_config.max_position_embeddings
    if rope_type not in _ROPE_TYPES_WITH_OWN_LENGTH:
        # yarn is configured either with the extended or with the original length as
        # max_position_embeddings; its own key says what the factor applies to.
        original = rope.get("original_max_position_embeddings") or length
        length = max(length, math.floor(original * (rope.get("factor") or 1.0)))
    return length


def _sliding_windows(hf_config: Any, max_model_len: int) -> tuple[int | None, ...]:
    """As transformers' models apply them; a window that no sequence can outgrow is none."""
    num_layers: int = hf_config.num_hidden_layers
    window: int | None = getattr(hf_config, "sliding_window", None)
    if hf_config.model_type not in _WINDOW_FAMILIES or window is None or window >= max_model_len:
        return (None,) * num_layers
    if hf_config.model_type == "mistral":
        return (window,) * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in hf_config.layer_types)
