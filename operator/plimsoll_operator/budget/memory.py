"""The byte budget of one accelerator (on CPU: of the container, which all ranks share).

In: a :class:`ModelShape` and the engine's settings. Out: a :class:`Budget`. Weights and KV cache are
exact: they follow from the sizes. Activations and runtime are estimated from above, since only a
running engine can measure them: the budget says so. Sizes in bytes, lengths in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from plimsoll_operator.budget.model import DTYPE_BYTES, ModelShape

MIB = 1 << 20
GIB = 1 << 30

# A step's tensors beside the weights, per token: the same estimate from above that the engine makes
# before it reads the weights (engine/plimsoll_engine/memory_estimate.py).
_HIDDEN_ROWS = 8
_INNER_ROWS = 4
# Logits of one pass with their copies, and sampling. On CPU logits are computed in passes of 32 MiB.
_WORKSPACE_GPU = 256 * MIB
_WORKSPACE_CPU = 64 * MIB
# Context, libraries and collective buffers: 1.79 GiB beside torch's own for one rank on an H100
# (github.com/vllm-project/vllm/pull/10511), rounded up.
_RUNTIME_GPU = 2 * GIB
# Interpreter and libraries of one process: 375 MiB measured (docs/log.md), rounded up.
_RUNTIME_CPU = 384 * MIB


class InvalidSetup(ValueError):
    """Settings with which no engine starts, whatever the memory. ``nearest`` would work."""

    def __init__(self, field: str, value: object, allowed: str, nearest: int) -> None:
        super().__init__(f"{field} is {value}; allowed: {allowed}")
        self.field, self.nearest = field, nearest


@dataclass(frozen=True)
class Setup:
    """``device`` is one accelerator's memory, on CPU the limit of each pod's container; ``max_model_len`` None:
    the largest that fits; ``dtype`` None: the model's own on an accelerator, float32 on CPU."""

    device: int
    tensor_parallel_size: int
    block_size: int
    utilization: float
    max_model_len: int | None
    max_num_batched_tokens: int
    on_cpu: bool = False
    dtype: str | None = None
    # Pods that share the ranks of one replica.
    nodes: int = 1


@dataclass(frozen=True)
class Budget:
    """``weights`` by part. ``num_blocks`` is the pool; ``length`` the one asked for, or the largest
    that fits (None: not even two blocks do)."""

    setup: Setup
    model: ModelShape
    dtype: str
    kv_heads: int
    weights: Mapping[str, int] = field(default_factory=dict)
    activations: int = 0
    runtime: int = 0
    bytes_per_token: int = 0

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.setup.block_size

    @property
    def fixed(self) -> int:
        return self.weight_bytes + self.activations + self.runtime

    @property
    def num_blocks(self) -> int:
        available = int(self.setup.device * self.setup.utilization) - self.fixed
        return max(0, available // self.bytes_per_block)

    @property
    def kv_cache(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def margin(self) -> int:
        """What the plan leaves alone; negative when the rest is more than there is."""
        return self.setup.device - self.fixed - self.kv_cache

    @property
    def pool_tokens(self) -> int:
        return self.num_blocks * self.setup.block_size

    @property
    def longest(self) -> int:
        """The longest request that the pool holds and the positions allow."""
        return min(self.model.max_model_len, self.pool_tokens)

    @property
    def length(self) -> int | None:
        """As the engine finds it where none is asked for: a whole block short of the pool."""
        if self.setup.max_model_len is not None:
            return self.setup.max_model_len
        found = min(self.model.max_model_len, (self.num_blocks - 1) * self.setup.block_size)
        return found if found > 0 else None

    @property
    def needed_blocks(self) -> int:
        """The least pool that serves the length; two blocks where none is asked for."""
        asked = self.setup.max_model_len
        return 2 if asked is None else math.ceil(asked / self.setup.block_size)

    @property
    def fits(self) -> bool:
        return self.num_blocks >= self.needed_blocks

    @property
    def concurrency(self) -> float | None:
        """Requests of that length that the pool holds at once."""
        return self.pool_tokens / self.length if self.fits and self.length else None


def allowed_tensor_sizes(model: ModelShape) -> tuple[int, ...]:
    """Numbers of ranks that give each rank whole heads, ascending."""
    heads, kv_heads = model.num_heads, model.num_kv_heads
    return tuple(
        size
        for size in range(1, heads + 1)
        if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
    )


def build_budget(model: ModelShape, setup: Setup) -> Budget:
    """Raises InvalidSetup."""
    _check(model, setup)
    size = setup.tensor_parallel_size
    dtype = setup.dtype or ("float32" if setup.on_cpu else model.dtype)
    item = DTYPE_BYTES[dtype]
    # Ranks beyond the KV heads hold copies of them.
    kv_heads = max(1, model.num_kv_heads // size)
    inner = math.ceil(model.intermediate_size / size)
    # A container on CPU holds its pod's ranks, the leader's those and what leads them.
    ranks = range(size // setup.nodes) if setup.on_cpu else range(1)
    weights: dict[str, int] = {}
    for rank in ranks:
        share = _inner_of(model, rank, size) if setup.on_cpu else inner
        for part, count in _elements(model, size, kv_heads, share).items():
            weights[part] = weights.get(part, 0) + count * item
    bytes_per_token = 2 * model.num_layers * kv_heads * model.head_size * item
    activations = (
        setup.max_num_batched_tokens
        * (_HIDDEN_ROWS * model.hidden_size + _INNER_ROWS * inner)
        * item
    ) + (_WORKSPACE_CPU if setup.on_cpu else _WORKSPACE_GPU)
    if setup.on_cpu:
        # Attention gathers keys and values of the longest context.
        context = setup.max_model_len or model.max_model_len
        activations += 2 * context * 2 * kv_heads * model.head_size * item
    # With several ranks a process of its own leads them.
    processes = len(ranks) + 1 if size > 1 else 1
    return Budget(
        setup=setup,
        model=model,
        dtype=dtype,
        kv_heads=kv_heads,
        weights=weights,
        activations=activations * len(ranks),
        runtime=processes * _RUNTIME_CPU if setup.on_cpu else _RUNTIME_GPU,
        bytes_per_token=bytes_per_token * len(ranks),
    )


def _check(model: ModelShape, setup: Setup) -> None:
    if not 0 < setup.utilization <= 1:
        allowed = "above 0, at most 1"
        raise InvalidSetup("spec.engine.gpuMemoryUtilization", setup.utilization, allowed, 1)
    sizes, size = allowed_tensor_sizes(model), setup.tensor_parallel_size
    sizes = tuple(each for each in sizes if each % setup.nodes == 0)
    if not sizes:
        allowed = f"a divisor of the model's {model.num_heads} attention heads"
        raise InvalidSetup("spec.parallelism.nodes", setup.nodes, allowed, 1)
    if size not in sizes:
        raise InvalidSetup(
            "spec.parallelism.tensor",
            size,
            f"{', '.join(map(str, sizes))} (the model has {model.num_heads} attention heads and "
            f"{model.num_kv_heads} KV heads)",
            max((each for each in sizes if each <= size), default=sizes[0]),
        )
    length = setup.max_model_len
    if length is not None and length > model.max_model_len:
        raise InvalidSetup(
            "spec.engine.maxModelLen",
            length,
            f"at most {model.max_model_len} (the model's positions)",
            model.max_model_len,
        )


def _inner_of(model: ModelShape, rank: int, size: int) -> int:
    total = model.intermediate_size
    return total * (rank + 1) // size - total * rank // size


def _elements(model: ModelShape, size: int, kv_heads: int, inner: int) -> dict[str, int]:
    """One rank's weights by part, in elements. The vocabulary is divided where it divides evenly,
    and held whole by every rank otherwise."""
    hidden, head, layers = model.hidden_size, model.head_size, model.num_layers
    vocabulary = model.vocab_size // size if model.vocab_size % size == 0 else model.vocab_size
    queries = model.num_heads // size * head
    rows = queries + 2 * kv_heads * head
    attention = rows * hidden + hidden * queries
    attention += rows * model.qkv_bias + hidden * model.output_bias
    mlp = 3 * inner * hidden + (2 * inner + hidden) * model.mlp_bias
    norms = 2 * hidden + 2 * head * model.qk_norm
    return {
        "embedding": vocabulary * hidden,
        "lm_head": 0 if model.tied_embeddings else vocabulary * hidden,
        "attention": layers * attention,
        "mlp": layers * mlp,
        "norms": layers * norms + hidden,
    }
