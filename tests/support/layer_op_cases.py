"""Runs the decoder's small kernels, and a decoder on kernels alone, under Triton's interpreter."""

from __future__ import annotations

import torch

from plimsoll_engine.attention import TorchAttention, TritonAttention
from plimsoll_engine.attention_batch import build_attention_batch
from plimsoll_engine.kv_cache import CudaKVCache, KVLayout
from plimsoll_engine.layer_ops import TORCH_OPS, LayerOps, triton_ops
from plimsoll_engine.models.config import ModelConfig
from plimsoll_engine.models.decoder import Decoder
from plimsoll_engine.parallel.group import LoneRank
from plimsoll_engine.parallel.shard import divide

CPU = torch.device("cpu")
EPSILON = 1e-5
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


def run_layer_ops() -> dict[str, float]:
    """Largest differences between kernels and twins, by operation and type; odd sizes throughout,
    and inputs that are parts of larger tensors as the decoder's are."""
    kernels = triton_ops()
    measured = {}
    for name, dtype in DTYPES.items():
        mine, theirs = compute(kernels, dtype), compute(TORCH_OPS, dtype)
        for operation, result in mine.items():
            difference = (result.float() - theirs[operation].float()).abs().max()
            measured[f"{operation}-{name}"] = float(difference)
    return measured


def compute(ops: LayerOps, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    hidden, residual, weight = random(3, 100), random(3, 100), random(100)
    # Three query heads and two key heads of 24, and one value head that is not touched.
    query, key, _ = random(3, 6, 24).split((3, 2, 1), dim=1)
    cos, sin = random(3, 1, 12), random(3, 1, 12)
    # Wide enough for exp to overflow, and for two programs per row.
    gates = random(2, 2 * 1030) * 60
    normed, total = ops.add_rms_norm(hidden, residual, weight, EPSILON)
    turned_query, turned_key = ops.rotary(query, key, cos, sin)
    return {
        "rms_norm": ops.rms_norm(hidden, weight, EPSILON),
        "head_norm": ops.rms_norm(query, random(24), EPSILON),
        "add_rms_norm": normed,
        "sum": total,
        "rotary_query": turned_query,
        "rotary_key": turned_key,
        "silu_and_mul": ops.silu_and_mul(gates),
    }


def run_decoder() -> dict[str, float]:
    """A step of two sequences, one a later chunk, through everything that runs on CUDA."""
    config = ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=50,
        hidden_size=48,
        intermediate_size=40,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_size=24,
        rms_norm_eps=EPSILON,
        tied_embeddings=True,
        qkv_bias=True,
        output_bias=False,
        mlp_bias=False,
        qk_norm=True,
        max_model_len=64,
        sliding_windows=(None, 6),
        inverse_frequencies=tuple(10.0**-power for power in range(12)),
        rope_factor=1.0,
        stored_dtype="float32",
    )
    batch = build_attention_batch([4, 1], [4, 9], [[2], [0]], CPU)
    slots = torch.tensor([32, 33, 34, 35, 8])
    token_ids, positions = torch.tensor([3, 1, 4, 1, 5]), torch.tensor([0, 1, 2, 3, 8])
    shard = divide(num_heads=4, num_kv_heads=2, intermediate_size=40, vocab_size=50, rank=0, size=1)

    def forward(ops: LayerOps, attention: type[TorchAttention | TritonAttention]) -> torch.Tensor:
        decoder = Decoder(config, shard, LoneRank(), torch.float32, CPU, ops)
        generator = torch.Generator().manual_seed(0)
        for place in decoder.destinations().values():
            place.target.normal_(generator=generator, std=0.3)
        layout = KVLayout(2, 2, 24, 16, torch.float32, blocks_per_segment=2)
        cache = CudaKVCache(layout, 2 * layout.segment_bytes, CPU)
        cache.resize(3)
        attend = attention(cache, batch, slots, config.attention)
        return decoder.forward(token_ids, positions, attend)

    mine, theirs = forward(triton_ops(), TritonAttention), forward(TORCH_OPS, TorchAttention)
    return {"hidden": float((mine - theirs).abs().max())}
