"""Tiny models of families that transformers runs and this engine's decoder does not."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from support.tiny_models import VOCAB_SIZE

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny_config(model_type: str, **changes: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, **{**_SHAPE, **changes})


FAMILIES: dict[str, PretrainedConfig] = {
    # A cap on scores, another on logits, a window in every other layer, a scale of its own.
    "gemma2": tiny_config(
        "gemma2",
        head_dim=16,
        sliding_window=20,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=9.0,
        query_pre_attn_scalar=24,
    ),
    # Angles that differ between layers with a window and those without.
    "gemma3_text": tiny_config(
        "gemma3_text",
        head_dim=16,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "phi3": tiny_config("phi3", sliding_window=30, original_max_position_embeddings=256),
    # Positions that are learned, one tensor for queries, keys and values.
    "gpt2": tiny_config("gpt2", num_key_value_heads=None, scale_attn_by_inverse_layer_idx=True),
    "gpt_neox": tiny_config("gpt_neox", use_parallel_residual=True),
    "olmo2": tiny_config("olmo2"),
    # Factors on embeddings, residuals, scores and logits.
    "granite": tiny_config(
        "granite",
        embedding_multiplier=2.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
        logits_scaling=3.0,
    ),
    "starcoder2": tiny_config("starcoder2", sliding_window=21),
    "cohere": tiny_config("cohere", logit_scale=0.3),
    # Embeddings narrower than the layers; the head asks for the body's decoder.
    "opt": tiny_config("opt", ffn_dim=96, word_embed_proj_dim=32),
    "mixtral": tiny_config("mixtral", num_local_experts=4, num_experts_per_tok=2),
}
