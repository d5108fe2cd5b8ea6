"""Whether a budget works, and the nearest settings that do.

In: a :class:`Budget`. Out: a :class:`Verdict`, whose ways are each enough by themselves, the
smallest change first. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from plimsoll_operator.budget.memory import Budget, allowed_tensor_sizes, build_budget

# 1.0 would be right on paper alone.
_HIGHEST_UTILIZATION = 0.98
_MEMORY_STEP = 64 << 20


@dataclass(frozen=True)
class Way:
    """One field of the spec with a value that would work."""

    field: str
    value: int | float
    text: str


@dataclass(frozen=True)
class Verdict:
    fits: bool
    text: str
    ways: tuple[Way, ...] = ()


def judge(budget: Budget) -> Verdict:
    if budget.fits:
        return Verdict(
            True,
            f"fits: {budget.concurrency:.1f} requests of {budget.length} tokens at once, in "
            f"{budget.num_blocks} blocks",
        )
    setup = budget.setup
    wanted = setup.max_model_len or 2 * setup.block_size
    what = "the container's memory" if setup.on_cpu else "one accelerator"
    if budget.weight_bytes + budget.runtime >= setup.device:
        text = f"does not fit: weights and runtime alone fill {what}"
    elif not budget.num_blocks:
        text = f"does not fit: nothing is left for the KV cache at {setup.utilization:g}"
    else:
        text = (
            f"does not fit: a request of {wanted} tokens needs {budget.needed_blocks} blocks, and "
            f"there are {budget.num_blocks}"
        )
    return Verdict(False, text, _ways(budget))


def _ways(budget: Budget) -> tuple[Way, ...]:
    setup, ways = budget.setup, []
    if setup.max_model_len is not None and budget.longest:
        longest = budget.longest
        ways.append(Way("spec.engine.maxModelLen", longest, f"lower the length to {longest}"))
    utilization = _utilization(budget)
    if utilization <= _HIGHEST_UTILIZATION:
        text = f"raise the utilisation to {utilization:g}"
        ways.append(Way("spec.engine.gpuMemoryUtilization", utilization, text))
    tensor = None if setup.on_cpu else _tensor(budget)
    if tensor is not None:
        text = f"spread a replica over {tensor} accelerators"
        ways.append(Way("spec.parallelism.tensor", tensor, text))
    if setup.on_cpu:
        memory = _memory(budget)
        text = f"raise the memory limit to {memory // (1 << 20)}Mi"
        ways.append(Way("spec.resources.limits.memory", memory, text))
    return tuple(ways)


def _needed(budget: Budget) -> int:
    return budget.fixed + budget.needed_blocks * budget.bytes_per_block


def _utilization(budget: Budget) -> float:
    """The smallest in whole percent that is enough; above 1 when none is."""
    percent = math.ceil(100 * _needed(budget) / budget.setup.device)
    # int(device * x) may fall one byte short of what the percentage promises.
    while percent <= 100 and not _at(budget, percent / 100).fits:
        percent += 1
    return percent / 100


def _at(budget: Budget, utilization: float) -> Budget:
    return replace(budget, setup=replace(budget.setup, utilization=utilization))


def _tensor(budget: Budget) -> int | None:
    """The next size that is enough."""
    for size in allowed_tensor_sizes(budget.model):
        setup = replace(budget.setup, tensor_parallel_size=size)
        larger = size > budget.setup.tensor_parallel_size
        if larger and size % setup.nodes == 0 and build_budget(budget.model, setup).fits:
            return size
    return None


def _memory(budget: Budget) -> int:
    needed = _needed(budget) / budget.setup.utilization
    return math.ceil(needed / _MEMORY_STEP) * _MEMORY_STEP
