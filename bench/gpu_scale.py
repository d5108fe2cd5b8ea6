"""How large the sections of ``gpu.py`` are: on a device, and in a smoke run that only shows that they run.

In: nothing. Out: frozen values. Model shapes are those of published configurations; their weights
are drawn at random, which changes no time.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Shape:
    """A model of the engine's own decoder."""

    name: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    tied_embeddings: bool

    @property
    def parameters(self) -> int:
        attention = self.head_size * (2 * self.num_heads + 2 * self.num_kv_heads)
        layer = self.hidden_size * (attention + 3 * self.intermediate_size)
        tables = 1 if self.tied_embeddings else 2
        return self.num_layers * layer + tables * self.vocab_size * self.hidden_size

    def kv_bytes(self, itemsize: int) -> int:
        """Of one token."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_size * itemsize

    def save(self, folder: Path) -> None:
        """The configuration alone."""
        architectures = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
        config: dict[str, Any] = {
            "model_type": self.model_type,
            "architectures": [architectures[self.model_type]],
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.tied_embeddings,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))


@dataclass(frozen=True)
class Workload:
    """Lengths of prompts and outputs in tokens, drawn as nano-vllm's bench.py draws them."""

    prompts: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]

    @property
    def output_tokens(self) -> int:
        return sum(self.outputs)

    @property
    def input_tokens(self) -> int:
        return sum(map(len, self.prompts))


def nano_vllm_workload(
    sequences: int = 256, shortest: int = 100, longest: int = 1024, largest_id: int = 10_000
) -> Workload:
    draw = random.Random(0)
    prompts = tuple(
        tuple(draw.randint(0, largest_id) for _ in range(draw.randint(shortest, longest)))
        for _ in range(sequences)
    )
    return Workload(prompts, tuple(draw.randint(shortest, longest) for _ in range(sequences)))


@dataclass(frozen=True)
class Decode:
    batch: int
    context: int


@dataclass(frozen=True)
class Burst:
    """``free``: what the ballast leaves of the device; ``neighbour``: what a neighbour takes of that
    between the start and the burst. Prompts arrive evenly in the first half of ``seconds``."""

    shape: Shape
    free: int
    neighbour: int
    max_model_len: int
    # The length that the tuner has to admit always.
    floor: int
    requests: int
    prompt: int
    output: int
    seconds: float
    # The tuner looks so often.
    scrape: float


@dataclass(frozen=True)
class Scale:
    kind: str
    dtype: str
    # What the engine may use; None: all.
    device_memory: int | None
    copy_bytes: int
    matmul_size: int
    # Query heads, KV heads and head size of the attention kernels: Llama-8B's.
    attention: tuple[int, int, int]
    decodes: tuple[Decode, ...]
    prefills: tuple[int, ...]
    repeats: int
    served: tuple[Shape, ...]
    workload: Workload
    max_model_len: int
    max_num_batched_tokens: int
    # Nearly nothing: what its steps take is the engine's own.
    tiny: Shape
    overhead_batches: tuple[int, ...]
    overhead_steps: int
    resized: Shape
    resized_bytes: int
    burst: Burst


TINY = Shape("tiny", "llama", 64, 128, 1, 4, 2, 16, 1024, True)
QWEN3_0_6B = Shape("Qwen3-0.6B", "qwen3", 1024, 3072, 28, 16, 8, 128, 151_936, True)
LLAMA_8B = Shape("Llama-8B", "llama", 4096, 14_336, 32, 32, 8, 128, 128_256, False)

FULL = Scale(
    kind="cuda",
    dtype="bfloat16",
    device_memory=None,
    copy_bytes=4 * GIB,
    matmul_size=8192,
    attention=(32, 8, 128),
    decodes=(Decode(64, 1024), Decode(64, 4096), Decode(256, 1024), Decode(1, 16_384)),
    prefills=(4096, 8192),
    repeats=10,
    served=(QWEN3_0_6B, LLAMA_8B),
    workload=nano_vllm_workload(),
    max_model_len=4096,
    max_num_batched_tokens=8192,
    tiny=TINY,
    overhead_batches=(1, 64, 256),
    overhead_steps=100,
    resized=QWEN3_0_6B,
    resized_bytes=8 * GIB,
    burst=Burst(
        shape=LLAMA_8B,
        free=24 * 10**9,
        neighbour=GIB,
        max_model_len=8192,
        floor=4096,
        requests=48,
        prompt=6000,
        output=128,
        seconds=60.0,
        scrape=2.0,
    ),
)

SMOKE = Scale(
    kind="cpu",
    dtype="float32",
    device_memory=3 * GIB // 2,
    copy_bytes=MIB,
    matmul_size=64,
    attention=(4, 2, 64),
    decodes=(Decode(2, 40), Decode(1, 100)),
    prefills=(40,),
    repeats=1,
    served=(TINY,),
    workload=nano_vllm_workload(4, 5, 20, 1000),
    max_model_len=128,
    max_num_batched_tokens=64,
    tiny=TINY,
    overhead_batches=(1, 4),
    overhead_steps=4,
    resized=TINY,
    resized_bytes=64 * MIB,
    burst=Burst(
        shape=TINY,
        free=3 * GIB // 2,
        neighbour=MIB,
        max_model_len=128,
        floor=32,
        requests=4,
        prompt=60,
        output=8,
        seconds=4.0,
        scrape=0.2,
    ),
)
