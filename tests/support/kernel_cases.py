"""Cases for the kernels, and a program that runs them all under Triton's interpreter.

``python -m support.kernel_cases`` with TRITON_INTERPRET=1 prints, as JSON, for each case how far
kernel and plain-torch twin are apart. It is a process of its own because Triton decides at import
whether kernels are interpreted.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import torch

from plimsoll_engine.attention_batch import AttentionBatch, build_attention_batch
from plimsoll_engine.kv_cache import CudaKVCache, KVCache, KVLayout

NUM_LAYERS = 2
LAYER = 1


@dataclass(frozen=True)
class KernelCase:
    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    # (query tokens, context length) of each sequence.
    sequences: tuple[tuple[int, int], ...]


def _around(block: int) -> tuple[tuple[int, int], ...]:
    """Decodes at the lengths where blocks begin and end."""
    return tuple((1, length) for length in (1, block - 1, block, block + 1, 33))


CASES = (
    KernelCase("decode-block16", 9, 3, 64, 16, torch.float32, _around(16)),
    KernelCase("decode-block32", 4, 2, 64, 32, torch.float32, _around(32)),
    KernelCase("decode-block48-head80", 4, 4, 80, 48, torch.float32, _around(48)),
    KernelCase("decode-long", 2, 1, 64, 16, torch.float32, ((1, 1023), (1, 5))),
    KernelCase("decode-fp16", 9, 3, 64, 16, torch.float16, _around(16)),
    KernelCase("decode-24-heads-per-kv-head", 24, 1, 64, 16, torch.float32, ((1, 40),)),
    KernelCase("prefill", 9, 3, 64, 16, torch.float32, ((16, 16), (1, 1), (33, 33))),
    KernelCase("prefill-later-chunk", 9, 3, 64, 16, torch.float32, ((7, 40), (15, 64), (17, 18))),
    KernelCase("prefill-head256", 2, 1, 256, 16, torch.float32, ((21, 45),)),
    KernelCase("mixed", 8, 2, 64, 32, torch.float32, ((1, 33), (40, 47), (1, 1), (5, 5))),
    KernelCase("mixed-fp16", 9, 3, 64, 16, torch.float16, ((1, 33), (31, 47), (1, 16))),
)

# For the twin alone: the interpreter multiplies bfloat16 matrices by their bit patterns (in a
# kernel of one tl.dot as well), so there bfloat16 kernels are only compiled.
BFLOAT16_CASE = KernelCase("mixed-bf16", 8, 2, 128, 16, torch.bfloat16, ((1, 17), (9, 70)))


@dataclass(frozen=True)
class KernelInputs:
    query: torch.Tensor
    # Of all context positions, sequence after sequence.
    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    batch: AttentionBatch
    num_blocks: int


def make_inputs(case: KernelCase) -> KernelInputs:
    """Random values; each sequence's blocks are scattered over the pool."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    size = case.block_size
    counts = [math.ceil(context / size) for _, context in case.sequences]
    spare = 3
    scattered = torch.randperm(sum(counts) + spare, generator=generator).tolist()
    tables = [[scattered.pop() for _ in range(count)] for count in counts]
    slots = [
        table[position // size] * size + position % size
        for table, (_, context) in zip(tables, case.sequences, strict=True)
        for position in range(context)
    ]
    queries = sum(query for query, _ in case.sequences)
    return KernelInputs(
        query=random(queries, case.num_heads, case.head_size),
        key=random(len(slots), case.num_kv_heads, case.head_size),
        value=random(len(slots), case.num_kv_heads, case.head_size),
        slots=torch.tensor(slots),
        batch=build_attention_batch(
            [query for query, _ in case.sequences],
            [context for _, context in case.sequences],
            tables,
            torch.device("cpu"),
        ),
        num_blocks=sum(counts) + spare,
    )


def layout_of(case: KernelCase, blocks_per_segment: int = 3) -> KVLayout:
    return KVLayout(
        NUM_LAYERS,
        case.num_kv_heads,
        case.head_size,
        case.block_size,
        case.dtype,
        blocks_per_segment,
    )


def segmented_cache(case: KernelCase, num_blocks: int) -> KVCache:
    """Segments in tensors of their own, as on CUDA."""
    layout = layout_of(case)
    cache = CudaKVCache(layout, 2 * num_blocks * layout.bytes_per_block, torch.device("cpu"))
    cache.resize(num_blocks)
    return cache


def run_case(case: KernelCase) -> dict[str, float]:
    """Largest differences between kernels and twins."""
    from plimsoll_engine.ops.kv_write import kv_write
    from plimsoll_engine.ops.paged_attention import paged_attention
    from plimsoll_engine.reference.paged_attention import paged_attention as twin

    inputs = make_inputs(case)
    cache = segmented_cache(case, inputs.num_blocks)
    kv_write(inputs.key, inputs.value, cache, LAYER, inputs.slots)
    rows = cache.rows.view(-1, *layout_of(case).segment_shape)
    # [segments, 2, blocks, block_size, kv_heads, head_size] of the layer written, and of the other.
    written = rows[:, LAYER].transpose(0, 1).flatten(1, 3)
    stored = written[:, inputs.slots]
    wrong = (stored - torch.stack([inputs.key, inputs.value])).abs().max()
    elsewhere = rows[:, 1 - LAYER].abs().max()
    scale = case.head_size**-0.5
    mine = paged_attention(inputs.query, cache, LAYER, inputs.batch, scale)
    theirs = twin(inputs.query, cache, LAYER, inputs.batch, scale)
    return {
        "write": float(wrong),
        "elsewhere": float(elsewhere),
        "attention": float((mine.float() - theirs.float()).abs().max()),
    }


def main() -> None:
    print(json.dumps({case.name: run_case(case) for case in CASES}))


if __name__ == "__main__":
    main()
