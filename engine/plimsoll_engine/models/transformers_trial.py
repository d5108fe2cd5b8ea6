"""What a model of transformers asks of attention, found out by running it on sizes alone.

In: a parsed configuration. Out: a :class:`TransformersConfig`, or an EngineFailure that says
what the model needs and this engine has not. The model is built on torch's "meta" device, which has
shapes and no values, and a few tokens go through it: every layer's heads, scale, window and cap are
those that its own code hands to the attention interface. No weights are read.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from plimsoll_engine.models.config import DTYPES, LayerAttention, TransformersConfig
from plimsoll_engine.models.source import load_failure
from plimsoll_engine.models.transformers_attention import (
    IMPLEMENTATION,
    AttentionCall,
    attending,
)
from plimsoll_engine.models.transformers_decoder import SplitModel

HEAD_SIZES = range(16, 257)
_LAYER_TYPES = ("full_attention", "sliding_attention")
# With these the angles depend on the longest sequence of a batch once it is longer than the model
# was trained for. Up to there they do not.
_ROPE_TYPES_BY_LENGTH = ("dynamic", "longrope")
# What a layer may hand over beside what is used here: values that change nothing when they are None
# or False, and what the caller of the model gave it.
_USED = ("scaling", "sliding_window", "softcap")
_WITHOUT_EFFECT = ("dropout", "is_causal", "position_ids", "use_cache")
_TRIAL_TOKENS = 3


def try_model(hf_config: Any) -> TransformersConfig:
    """Raises EngineFailure ModelLoadFailed for a model that cannot be served."""
    model_type = hf_config.model_type
    kind = _model_class(hf_config)
    max_model_len = _max_model_len(hf_config)
    split, calls, vocab_size = _run(hf_config)
    num_layers = getattr(hf_config, "num_hidden_layers", None)
    numbers = [getattr(call.module, "layer_idx", None) for call in calls]
    if not calls or numbers != list(range(num_layers or 0)):
        _refuse(
            model_type,
            f"{num_layers} layers, of which these attend through the attention interface: {numbers}",
            "models whose every layer does, once",
        )
    for call in calls:
        _check_call(model_type, call)
    shapes = sorted({(call.query.shape[1], *call.key.shape[1::2]) for call in calls})
    if len(shapes) > 1:
        told = ", ".join(f"{heads} heads, {kv} KV heads of {size}" for heads, kv, size in shapes)
        _refuse(model_type, f"layers of different shapes ({told})", "one shape for all layers")
    [(num_heads, num_kv_heads, head_size)] = shapes
    if head_size not in HEAD_SIZES:
        allowed = f"{HEAD_SIZES.start} to {HEAD_SIZES.stop - 1}"
        _refuse(model_type, f"attention heads of size {head_size}", allowed)
    hidden_size = hf_config.hidden_size
    inner = getattr(hf_config, "intermediate_size", None)
    return TransformersConfig(
        architecture=kind.__name__,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        # Where a family leaves it open, its layers are four times as wide inside.
        intermediate_size=inner if isinstance(inner, int) else 4 * hidden_size,
        num_layers=len(calls),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        num_parameters=split.num_parameters(),
        max_model_len=max_model_len,
        attention=_layer_attention(hf_config, calls, max_model_len),
        stored_dtype=_stored_dtype(hf_config),
        hf_config=hf_config,
    )


def _refuse(model_type: str, what: str, supported: str) -> NoReturn:
    raise load_failure(f"the model's type {model_type} has {what}; supported: {supported}")


def _model_class(hf_config: Any) -> Any:
    """The class that transformers would load, where the engine can run it as far as the class
    tells."""
    model_type = hf_config.model_type
    if hf_config.is_encoder_decoder or hf_config.get_text_config() is not hf_config:
        _refuse(model_type, "more parts than one decoder", "models of text alone")
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        _refuse(model_type, "no causal language model in transformers", "types that have one")
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    for named in getattr(hf_config, "architectures", None) or []:
        if named != kind.__name__:
            _refuse(model_type, f"the architecture {named}", kind.__name__)
    if getattr(hf_config, "quantization_config", None):
        _refuse(model_type, "quantization_config", "unquantized safetensors")
    if kind._is_stateful:
        _refuse(model_type, "state beside keys and values", "models without")
    if not kind._supports_attention_backend or not kind._can_set_attn_implementation():
        _refuse(
            model_type,
            "no support for transformers' attention interface",
            "types with attention-backend support",
        )
    if "position_ids" not in inspect.signature(kind.forward).parameters:
        _refuse(model_type, "no position_ids among its inputs", "models that take positions")
    layer_types = getattr(hf_config, "layer_types", None) or ()
    for layer_type in layer_types:
        if layer_type not in _LAYER_TYPES:
            _refuse(model_type, f"layers of the type {layer_type}", ", ".join(_LAYER_TYPES))
    return kind


def _run(hf_config: Any) -> tuple[SplitModel, list[AttentionCall], int]:
    calls: list[AttentionCall] = []

    def record(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        heads, tokens = call.query.shape[1:3]
        return call.query.new_empty((1, tokens, heads, call.value.shape[-1]))

    try:
        with torch.device("meta"), torch.inference_mode():
            factory: Any = AutoModelForCausalLM
            model = factory.from_config(hf_config, attn_implementation=IMPLEMENTATION)
            split = SplitModel(model)
            ids = torch.zeros(_TRIAL_TOKENS, dtype=torch.long)
            with attending(record):
                hidden = split.hidden_states(ids, ids)
            logits = split.logits(hidden)
    # Whatever a family's code raises where it looks at values, or asks for what is not there.
    except Exception as error:
        raise load_failure(
            f"the model's type {hf_config.model_type} cannot be run on sizes alone "
            f"({type(error).__name__}: {str(error)[:200]}); supported: models whose steps do not "
            "depend on values"
        ) from error
    return split, calls, logits.shape[-1]


def _check_call(model_type: str, call: AttentionCall) -> None:
    if call.attention_mask is not None:
        _refuse(model_type, "a mask of its own", "causal attention, with or without a window")
    causal = call.settings.get("is_causal")
    if causal is False or (causal is None and getattr(call.module, "is_causal", True) is False):
        _refuse(model_type, "attention to later tokens", "causal attention")
    for name, value in call.settings.items():
        if name not in (*_USED, *_WITHOUT_EFFECT) and value is not None and value is not False:
            _refuse(model_type, f"{name} in its attention", ", ".join(_USED))
    query, key, value = call.query.shape, call.key.shape, call.value.shape
    if key != value or query[-1] != key[-1] or query[1] % key[1]:
        _refuse(
            model_type,
            f"queries {tuple(query)}, keys {tuple(key)} and values {tuple(value)}",
            "keys and values of the queries' head size, with heads that divide theirs",
        )
    if query[2] != _TRIAL_TOKENS or key[2] != _TRIAL_TOKENS:
        _refuse(model_type, "another number of keys than of tokens", "one key per token")


def _layer_attention(
    hf_config: Any, calls: list[AttentionCall], max_model_len: int
) -> tuple[LayerAttention, ...]:
    layer_types = getattr(hf_config, "layer_types", None) or ["sliding_attention"] * len(calls)
    stated = getattr(hf_config, "sliding_window", None)
    result = []
    for call, layer_type in zip(calls, layer_types, strict=True):
        window = call.settings.get("sliding_window")
        if window is None and stated is not None and layer_type == "sliding_attention":
            _refuse(hf_config.model_type, "a window in its mask alone", "windows told to attention")
        # One that no sequence can outgrow is none.
        if window is not None and window >= max_model_len:
            window = None
        scale = call.settings.get("scaling")
        result.append(
            LayerAttention(
                scale=float(call.query.shape[-1] ** -0.5 if scale is None else scale),
                sliding_window=window,
                soft_cap=call.settings.get("softcap"),
            )
        )
    return tuple(result)


def _max_model_len(hf_config: Any) -> int:
    length = getattr(hf_config, "max_position_embeddings", None)
    if type(length) is not int or length < 1:
        _refuse(
            hf_config.model_type, f"max_position_embeddings {length!r}", "a whole number above 0"
        )
    rope = getattr(hf_config, "rope_parameters", None) or {}
    # Some families have one kind of scaling for each type of layers.
    kinds = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]
    for kind in kinds:
        if kind.get("rope_type") in _ROPE_TYPES_BY_LENGTH:
            original = kind.get("original_max_position_embeddings") or getattr(
                hf_config, "original_max_position_embeddings", None
            )
            length = min(length, original or length)
    return length


def _stored_dtype(hf_config: Any) -> str:
    dtype = str(getattr(hf_config, "dtype", None) or torch.float32).removeprefix("torch.")
    return dtype if dtype in DTYPES else "float32"
