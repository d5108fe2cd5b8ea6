"""Random-weight models of every supported family, small enough for a CPU, as Hugging Face folders.

Weights are drawn wider than a trained model's, so that logits are far apart and an arg-max does not
hang on the order of a float32 sum.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 1000

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _config(kind: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    return kind(**{**_SHAPE, **changes})


FAMILIES: dict[str, PretrainedConfig] = {
    "llama": _config(LlamaConfig),
    "llama-tied-biased": _config(
        LlamaConfig, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    # Like SmolLM2: an odd number of heads.
    "llama-9-3": _config(
        LlamaConfig, hidden_size=144, num_attention_heads=9, num_key_value_heads=3
    ),
    "llama-rope-linear": _config(
        LlamaConfig, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    ),
    "llama-rope-llama3": _config(
        LlamaConfig,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama-rope-yarn": _config(
        LlamaConfig,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ),
    "mistral": _config(MistralConfig, head_dim=32, sliding_window=None),
    "mistral-window": _config(MistralConfig, head_dim=32, sliding_window=23),
    # The first layer sees all, the others a window.
    "qwen2-window": _config(
        Qwen2Config, use_sliding_window=True, sliding_window=40, max_window_layers=1
    ),
    "qwen2": _config(Qwen2Config, tie_word_embeddings=True),
    "qwen3": _config(Qwen3Config, head_dim=24),
}


def save_tiny_model(config: PretrainedConfig, folder: Path, seed: int = 0) -> Path:
    """Writes config.json and model.safetensors (float32); returns the folder."""
    torch.manual_seed(seed)
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # transformers starts biases at 0 and norms at 1, where a missing one would not show.
            if name.endswith("bias") or "norm" in name:
                weight.add_(torch.randn_like(weight), alpha=0.2)
    model.save_pretrained(folder)
    return folder


def reference_model(folder: Path) -> Any:
    """transformers' model in float32, which never stops at an end token."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model.eval()


def reference_greedy(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """transformers' own greedy generation. (min_new_tokens would forbid the end token.)"""
    generated = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    result: list[int] = generated[0, len(prompt) :].tolist()
    assert len(result) == max_tokens
    return result
