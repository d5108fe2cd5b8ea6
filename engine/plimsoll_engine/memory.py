"""The memory plan: what the device holds by class, how many KV blocks, and the longest request.

In: figures that the executor measured, the utilization and the length asked for. Out: a MemoryPlan,
or an EngineFailure with the figures and the nearest setting that works. Pure: nothing is
allocated here, no torch, no clock. All sizes are bytes, all lengths tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from plimsoll_engine.executor import DeviceMemory, MemoryFigures, ModelLimits
from plimsoll_engine.termination import EngineFailure, FailureClass, Phase

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# A suggested utilization leaves the device something: 1.0 would be right on paper alone.
_HIGHEST_SUGGESTED_UTILIZATION = 0.98
# How far two measurements of the same engine have been seen apart is 2 MiB.
_MEASURING_NOISE = 16 << 20
_MEMORY_STEP = 64 << 20


@dataclass(frozen=True)
class MemoryPlan:
    """``num_blocks`` is the pool at ``utilization``, never more than really fitted when measured.

    ``ceiling`` is the longest request (prompt plus output) that is ever accepted.
    """

    figures: MemoryFigures
    utilization: float
    block_size: int
    num_blocks: int
    ceiling: int

    @property
    def kv_cache(self) -> int:
        return self.num_blocks * self.figures.bytes_per_block

    @property
    def margin(self) -> int:
        """What the plan leaves alone."""
        return self.figures.total - _fixed(self.figures) - self.kv_cache

    @property
    def pool_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def blocks_at(self, utilization: float) -> int:
        """Blocks of the pool at another utilization, by the figures of the start."""
        return _blocks_at(self.figures, utilization)

    def room(self, free: int) -> int:
        """Blocks that can be mapped beside those that are, without touching what the worst step
        needs, when ``free`` bytes are free between steps."""
        return max(0, (free - self.figures.activations) // self.figures.bytes_per_block)

    def utilization_for(self, num_blocks: int) -> float:
        """The smallest utilization in whole percent whose pool has ``num_blocks``."""
        return _utilization_for(self.figures, num_blocks)

    def at(self, utilization: float, num_blocks: int) -> MemoryPlan:
        return replace(self, utilization=utilization, num_blocks=num_blocks)

    def format(self) -> str:
        """The table that is printed at start."""
        f = self.figures
        rows = [
            ("weights", f.weights, ""),
            ("activations", f.activations, "peak of the worst admissible step"),
            ("graphs", f.graphs, "recorded decode steps"),
            ("runtime", f.runtime, "interpreter, libraries, buffers"),
            (
                "KV cache",
                self.kv_cache,
                f"{self.num_blocks} blocks of {self.block_size} tokens = {self.pool_tokens} tokens",
            ),
            ("margin", self.margin, "left alone"),
            ("device", f.total, ""),
        ]
        lines = [f"Memory plan at utilization {self.utilization:g}:"]
        for name, size, note in rows:
            share = 100 * size / f.total
            lines.append(f"  {name:<12}{format_bytes(size):>12} {share:6.1f} %  {note}".rstrip())
        at_once = self.pool_tokens / self.ceiling
        lines.append(
            f"  longest request: {self.ceiling} tokens; "
            f"maximum concurrency for requests of that length: {at_once:.2f}x"
        )
        return "\n".join(lines)


def format_bytes(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(size) >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} B"


def check_length(model_max_len: int, max_model_len: int | None) -> None:
    """Raises EngineFailure when the length asked for is beyond the model's positions."""
    if max_model_len is not None and max_model_len > model_max_len:
        raise EngineFailure(
            FailureClass.INVALID_CONFIGURATION,
            Phase.LOAD,
            f"--max-model-len: User-specified max_model_len ({max_model_len}) is greater than the "
            f"derived max_model_len ({model_max_len}) of this model; expected at most that",
            figures={"max_model_len": max_model_len, "model_max_len": model_max_len},
            suggestion={"flag": "--max-model-len", "value": model_max_len},
        )


def length_to_profile(
    model: ModelLimits,
    device: DeviceMemory,
    *,
    max_model_len: int | None,
    utilization: float,
    block_size: int,
    ranks: int,
) -> int:
    """The longest context that the profiled step should have.

    Without a length asked for, it is what the memory left after loading could hold if all of it
    were KV cache: the real ceiling, known only after profiling, is never above that.
    """
    if max_model_len is not None:
        return max_model_len
    heads = max(1, model.num_kv_heads // ranks)
    per_token = 2 * model.num_layers * heads * model.head_size * _DTYPE_BYTES[model.dtype]
    left = int(device.total * utilization) - (device.total - device.free)
    return max(block_size, min(model.max_model_len, left // per_token))


def build_plan(
    figures: MemoryFigures,
    *,
    free: int,
    utilization: float,
    block_size: int,
    model_max_len: int,
    max_model_len: int | None,
) -> MemoryPlan:
    """``free`` is measured between steps, before any KV block is mapped.

    Raises EngineFailure: ModelTooLarge when the weights leave nothing, KVTooSmallForMaxLen when
    one request of the length asked for does not fit, GPUBusyAtStart when it would, were it not for
    memory that others hold.
    """
    if figures.weights + figures.graphs + figures.runtime >= figures.total:
        raise _too_large(figures, utilization, block_size, max_model_len)
    planned = _blocks_at(figures, utilization)
    plan = MemoryPlan(figures, utilization, block_size, 0, ceiling=0)
    blocks = min(planned, plan.room(free))

    if max_model_len is None:
        # A whole block short of the pool: exactly its size would leave the longest request no
        # neighbour and no slack.
        ceiling = min(model_max_len, (blocks - 1) * block_size)
        needed = 2
    else:
        ceiling = max_model_len
        needed = plan.blocks_for(max_model_len)
    if blocks < needed:
        wanted = max_model_len or block_size
        if planned >= needed:
            raise _busy(plan, free, blocks, needed, wanted)
        raise _too_small(plan, blocks, needed, wanted)
    return replace(plan, num_blocks=blocks, ceiling=ceiling)


def _fixed(figures: MemoryFigures) -> int:
    return figures.weights + figures.activations + figures.graphs + figures.runtime


def _blocks_at(figures: MemoryFigures, utilization: float) -> int:
    available = int(figures.total * utilization) - _fixed(figures)
    return max(0, available // figures.bytes_per_block)


def _utilization_for(figures: MemoryFigures, num_blocks: int) -> float:
    needed = _fixed(figures) + num_blocks * figures.bytes_per_block
    percent = math.ceil(100 * needed / figures.total)
    # int(total * x) may fall one byte short of what the percentage promises.
    while _blocks_at(figures, percent / 100) < num_blocks:
        percent += 1
    return percent / 100


def _memory_for(figures: MemoryFigures, utilization: float, num_blocks: int) -> int:
    """The device (or container) that would do, in whole steps and with room: the next start does
    not measure quite the same."""
    needed = (_fixed(figures) + num_blocks * figures.bytes_per_block) / utilization
    return math.ceil((needed + _MEASURING_NOISE) / _MEMORY_STEP) * _MEMORY_STEP


def _figures(figures: MemoryFigures) -> dict[str, int | float | str]:
    return {
        "total_bytes": figures.total,
        "weights_bytes": figures.weights,
        "activations_bytes": figures.activations,
        "graphs_bytes": figures.graphs,
        "runtime_bytes": figures.runtime,
        "bytes_per_block": figures.bytes_per_block,
    }


def _too_large(
    figures: MemoryFigures, utilization: float, block_size: int, max_model_len: int | None
) -> EngineFailure:
    blocks = -(-max_model_len // block_size) if max_model_len else 2
    memory = _memory_for(figures, utilization, blocks)
    return EngineFailure(
        FailureClass.MODEL_TOO_LARGE,
        Phase.KV_CACHE,
        f"No available memory for the cache blocks: weights ({format_bytes(figures.weights)}), "
        f"graphs ({format_bytes(figures.graphs)}) and runtime ({format_bytes(figures.runtime)}) fill "
        f"the device's {format_bytes(figures.total)}. {format_bytes(memory)} would do.",
        figures=_figures(figures) | {"memory_needed_bytes": memory},
        suggestion={"flag": "memory", "value": memory},
    )


def _too_small(plan: MemoryPlan, blocks: int, needed: int, wanted: int) -> EngineFailure:
    figures, utilization = plan.figures, plan.utilization
    needed_bytes = needed * figures.bytes_per_block
    available = max(0, int(figures.total * utilization) - _fixed(figures))
    longest = blocks * plan.block_size
    needed_utilization = _utilization_for(figures, needed)
    memory = _memory_for(figures, utilization, needed)

    ways: list[str] = []
    suggestion: dict[str, str | int | float] = {"flag": "memory", "value": memory}
    if needed_utilization <= _HIGHEST_SUGGESTED_UTILIZATION:
        suggestion = {"flag": "--gpu-memory-utilization", "value": needed_utilization}
        ways.append(f"raise --gpu-memory-utilization to {needed_utilization:g}")
    if longest:
        suggestion = {"flag": "--max-model-len", "value": longest}
        ways.insert(0, f"lower --max-model-len to {longest}")
    ways.append(f"give the engine {format_bytes(memory)} of memory")
    nothing = "" if blocks else "No available memory for the cache blocks. "
    return EngineFailure(
        FailureClass.KV_TOO_SMALL_FOR_MAX_LEN,
        Phase.KV_CACHE,
        f"{nothing}To serve at least one request with the model's max seq len ({wanted}), "
        f"{needed_bytes / (1 << 30):.3f} GiB KV cache is needed, which is larger than the "
        f"available KV cache memory ({available / (1 << 30):.3f} GiB). Based on the available "
        f"memory, the estimated maximum model length is {longest}. Either {', or '.join(ways)}.",
        figures=_figures(figures)
        | {
            "gpu_memory_utilization": utilization,
            "max_model_len": wanted,
            "kv_cache_needed_bytes": needed_bytes,
            "kv_cache_available_bytes": available,
            "max_model_len_that_fits": longest,
            "gpu_memory_utilization_needed": needed_utilization,
            "memory_needed_bytes": memory,
        },
        suggestion=suggestion,
    )


def _busy(plan: MemoryPlan, free: int, blocks: int, needed: int, wanted: int) -> EngineFailure:
    figures = plan.figures
    elsewhere = figures.total - free - figures.weights - figures.graphs - figures.runtime
    longest = blocks * plan.block_size
    return EngineFailure(
        FailureClass.DEVICE_BUSY_AT_START,
        Phase.KV_CACHE,
        f"Free memory on device ({format_bytes(free)} of {format_bytes(figures.total)}) is less "
        f"than desired GPU memory utilization ({plan.utilization:g}) needs: others hold "
        f"{format_bytes(elsewhere)}. A request of {wanted} tokens needs "
        f"{format_bytes(needed * figures.bytes_per_block)} of KV cache, "
        f"{format_bytes(blocks * figures.bytes_per_block)} fit now.",
        figures=_figures(figures)
        | {
            "gpu_memory_utilization": plan.utilization,
            "max_model_len": wanted,
            "free_bytes": free,
            "held_elsewhere_bytes": elsewhere,
            "max_model_len_that_fits": longest,
        },
        suggestion={"flag": "--max-model-len", "value": longest} if longest else None,
    )
