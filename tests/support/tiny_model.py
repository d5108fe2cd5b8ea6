"""A Llama model small enough to start in seconds, with a tokenizer of bytes: made, not downloaded.

In: a folder and a few sizes. Out: a Hugging Face model folder with random weights. Its answers mean
nothing; its memory, lengths and API are those of any model.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

MAX_POSITIONS = 2048
END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def write_tiny_model(
    folder: Path,
    *,
    hidden_size: int = 96,
    num_layers: int = 2,
    intermediate_size: int = 128,
    num_kv_heads: int = 3,
) -> Path:
    """Six query heads, and three KV heads if no other number is given: one rank or three can share them.

    A byte is a token; every prompt's length is its number of bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    vocabulary = 257
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 6,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": vocabulary,
        "bos_token_id": None,
        "eos_token_id": vocabulary - 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = np.random.default_rng(0)

    def weights(rows: int, columns: int) -> npt.NDArray[np.float32]:
        return generator.normal(0, 0.05, (rows, columns)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": weights(vocabulary, hidden_size),
        "model.norm.weight": np.ones(hidden_size, np.float32),
    }
    shapes = {
        "self_attn.q_proj": (6 * 16, hidden_size),
        "self_attn.k_proj": (num_kv_heads * 16, hidden_size),
        "self_attn.v_proj": (num_kv_heads * 16, hidden_size),
        "self_attn.o_proj": (hidden_size, 6 * 16),
        "mlp.gate_proj": (intermediate_size, hidden_size),
        "mlp.up_proj": (intermediate_size, hidden_size),
        "mlp.down_proj": (hidden_size, intermediate_size),
    }
    for layer in range(num_layers):
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = weights(*shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = np.ones(hidden_size, np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file in folder.iterdir():
        file.chmod(0o644)
    return folder


def pretend_to_be_large(folder: Path) -> None:
    """Changes the configuration to sizes of some 1.8 GiB; the weights stay what they are, so this
    is for tests that must not get as far as reading them."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "hidden_size": 4608, "intermediate_size": 16384}))


def _write_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": END,
                "chat_template": CHAT_TEMPLATE,
                "model_max_length": MAX_POSITIONS,
            }
        )
    )
