"""Which part of a model one tensor-parallel rank holds. Pure arithmetic on the configuration.

In: head counts, sizes, rank and number of ranks. Out: half-open ranges. Query heads are divided
evenly; key/value heads are divided, or repeated when there are more ranks than heads; the MLP's
inner width is divided as evenly as it goes; the vocabulary is divided where it divides and
otherwise held whole by every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll_engine.termination import EngineFailure, FailureClass, Phase


@dataclass(frozen=True)
class Shard:
    rank: int
    size: int
    # Half-open ranges of what this rank holds.
    query_heads: range
    kv_heads: range
    intermediate: range
    vocabulary: range
    # False: every rank holds the whole vocabulary.
    vocabulary_divided: bool


def allowed_sizes(num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """Numbers of ranks that give each rank whole heads, ascending."""
    return tuple(
        size
        for size in range(1, num_heads + 1)
        if num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)
    )


def check_size(num_heads: int, num_kv_heads: int, size: int) -> None:
    """Raises EngineFailure InvalidConfiguration when the heads cannot be divided so."""
    sizes = allowed_sizes(num_heads, num_kv_heads)
    if size not in sizes:
        nearest = max(candidate for candidate in sizes if candidate <= size)
        raise EngineFailure(
            FailureClass.INVALID_CONFIGURATION,
            Phase.CONFIGURATION,
            f"--tensor-parallel-size {size}: the model has {num_heads} attention heads and "
            f"{num_kv_heads} KV heads, which cannot be divided among {size} ranks; allowed: "
            + ", ".join(map(str, sizes)),
            {"num_attention_heads": num_heads, "num_kv_heads": num_kv_heads, "size": size},
            {"flag": "--tensor-parallel-size", "value": nearest},
        )


def divide(
    *,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    vocab_size: int,
    rank: int = 0,
    size: int = 1,
) -> Shard:
    """The part of ``rank``; ``size`` must be one of ``allowed_sizes``."""
    heads = _part(num_heads, rank, size)
    group = num_heads // num_kv_heads
    # The KV heads that this rank's query heads attend to.
    kv_heads = range(heads.start // group, (heads.stop - 1) // group + 1)
    divided = vocab_size % size == 0
    return Shard(
        rank=rank,
        size=size,
        query_heads=heads,
        kv_heads=kv_heads,
        intermediate=_part(intermediate_size, rank, size),
        vocabulary=_part(vocab_size, rank, size) if divided else range(vocab_size),
        vocabulary_divided=divided and size > 1,
    )


def _part(total: int, rank: int, size: int) -> range:
    return range(total * rank // size, total * (rank + 1) // size)
