"""How much device memory is in use: what was planned for, and what no plan can see.

In: the start of a life, a step, the time. Out: bytes in use. ``used = context + weights + graphs +
pool + activations(step) + fragmentation + surprise + co-tenant``; above the device's total the
process dies. A controller is only ever told the free bytes.

Fragmentation and surprises are assumptions, sized by public reports of OOM under load (failing
allocations of 72 to 304 MiB, 119 to 711 MiB reserved but unallocated, one buffer of 1.15 GiB), and
are swept by a factor.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll_simulator.hardware import BLOCK_SIZE, GIB, MIB, Hardware, Model

# Lognormal: median 0.35 GiB, 99th percentile 1.2 GiB.
FRAGMENTATION_MEDIAN = 0.35 * GIB
FRAGMENTATION_SIGMA = math.log(1.2 / 0.35) / 2.326
# A new shape of prompt (256 tokens wide) leaves this behind in the allocator.
_SHAPE_BYTES = 2 * MIB
_SHAPE_TOKENS = 256
# Surprises: one in ten minutes, of 0.07 to 0.3 GiB for 2 s; one in fifty is 1.15 GiB.
_SURPRISE_INTERVAL = 600.0
_SURPRISE_SECONDS = 2.0
_SURPRISE_RANGE = (0.07 * GIB, 0.3 * GIB)
_SURPRISE_LARGE = 1.15 * GIB
_SURPRISE_LARGE_SHARE = 0.02
# Activations grow by 0.12 GiB per 1024 tokens of a step.
_BYTES_PER_BATCHED_TOKEN = 0.12 * GIB / 1024
# Workspace over the longest context of a step, which no start profiles: a row of hidden values
# in 16 bits per token.
_WORKSPACE_BYTES_PER_VALUE = 2
# Logits of the sampled rows in 32 bits; for prompt log-probabilities, of the chunk's rows.
_LOGIT_BYTES = 4


@dataclass(frozen=True)
class CoTenant:
    """Another process on the device: ``bytes`` from ``start`` on for ``seconds``."""

    start: float
    seconds: float
    bytes: float


@dataclass(frozen=True)
class Leak:
    """Memory that a life loses, bytes per second."""

    start: float
    seconds: float
    rate: float


@dataclass(frozen=True)
class Surprise:
    start: float
    bytes: float


def draw_surprises(seed: str, span: float) -> tuple[Surprise, ...]:
    """Of one run, in order; the same for every policy."""
    chance = random.Random(f"surprises {seed}")
    found, time = [], chance.expovariate(1 / _SURPRISE_INTERVAL)
    while time < span:
        large = chance.random() < _SURPRISE_LARGE_SHARE
        size = chance.uniform(*_SURPRISE_RANGE)
        found.append(Surprise(time, _SURPRISE_LARGE if large else size))
        time += chance.expovariate(1 / _SURPRISE_INTERVAL)
    return tuple(found)


class DeviceMemory:
    """One device over the lives of one replica. ``factor`` scales fragmentation and surprises."""

    def __init__(
        self,
        hardware: Hardware,
        model: Model,
        *,
        seed: str,
        factor: float,
        surprises: Sequence[Surprise] = (),
        cotenant: CoTenant | None = None,
        leak: Leak | None = None,
    ) -> None:
        self.hardware = hardware
        self._model = model
        self._chance = random.Random(f"fragmentation {seed}")
        self._factor = factor
        self._surprises = [s for s in surprises if factor]
        self._starts = [s.start for s in self._surprises]
        self._cotenant = cotenant
        self._leak = leak
        self.block_bytes = BLOCK_SIZE * model.kv_bytes_per_token
        self._fixed = float(model.weight_bytes + hardware.reserved_bytes)
        self.start(0.0, 0)

    def start(self, now: float, max_num_batched_tokens: int) -> None:
        """A new life: fragmentation is drawn anew."""
        drawn = self._chance.lognormvariate(0.0, FRAGMENTATION_SIGMA)
        self._fragmentation = self._factor * FRAGMENTATION_MEDIAN * drawn
        self._born = now
        self._shapes: set[int] = set()
        # What the start has profiled is part of the reserve.
        self.profiled = max_num_batched_tokens * _BYTES_PER_BATCHED_TOKEN
        # The allocator keeps what a step once needed.
        self._beyond_profile = 0.0

    def see_prompt(self, tokens: int) -> None:
        shape = tokens // _SHAPE_TOKENS
        if shape not in self._shapes:
            self._shapes.add(shape)
            self._fragmentation += self._factor * _SHAPE_BYTES

    def activations_beyond_profile(self, tokens: int, longest: int, logprob_rows: int = 0) -> float:
        """Of one step, above what the start has reserved; negative below it."""
        model = self._model
        return (
            tokens * _BYTES_PER_BATCHED_TOKEN
            - self.profiled
            + longest * model.hidden_size * _WORKSPACE_BYTES_PER_VALUE
            + logprob_rows * model.vocab_size * _LOGIT_BYTES
        )

    def held(self, now: float, blocks: int) -> float:
        """Bytes in use, with activations as large as their reserve."""
        return self._fixed + blocks * self.block_bytes + self._unplanned(now)

    def overflows(self, now: float, blocks: int, beyond: float) -> bool:
        """Whether the step ends the process."""
        self._beyond_profile = max(self._beyond_profile, beyond)
        return self.held(now, blocks) + beyond > self.hardware.total_bytes

    def free(self, now: float, blocks: int) -> int:
        """As the device reports it: what the allocator keeps is not free."""
        used = self.held(now, blocks) + self._beyond_profile
        return max(0, int(self.hardware.total_bytes - used))

    def free_at_start(self, now: float) -> float:
        """Before a process starts, when only the co-tenant is there."""
        return self.hardware.total_bytes - self._cotenant_bytes(now)

    def _unplanned(self, now: float) -> float:
        others = self._fragmentation + self._surprise(now)
        if self._cotenant is not None:
            others += self._cotenant_bytes(now)
        if self._leak is not None:
            others += self._leaked(now)
        return others

    def _surprise(self, now: float) -> float:
        index = bisect_right(self._starts, now) - 1
        if index < 0 or now > self._starts[index] + _SURPRISE_SECONDS:
            return 0.0
        return self._factor * self._surprises[index].bytes

    def _cotenant_bytes(self, now: float) -> float:
        tenant = self._cotenant
        if tenant is None or not tenant.start <= now < tenant.start + tenant.seconds:
            return 0.0
        return tenant.bytes

    def _leaked(self, now: float) -> float:
        leak = self._leak
        if leak is None:
            return 0.0
        end = min(now, leak.start + leak.seconds)
        return max(0.0, end - max(self._born, leak.start)) * leak.rate
