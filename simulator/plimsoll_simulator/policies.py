"""The policies that are compared: what an engine starts with, and what moves its limits.

In: a name, hardware and a model. Out: a :class:`Policy`. The baselines S1 to S9 are today's ways to
run vLLM, with one pinned setting each but for S7, which looks for it, and S9, which restarts; S10 and
O2 look ahead at admission. Any other
pinned setting has its values as its name (:class:`Pinned`): those that the oracle looks through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from plimsoll_simulator.hardware import Hardware, Model, pool_blocks
from plimsoll_simulator.memory_model import DeviceMemory
from plimsoll_simulator.records import Death, DeathCause, Move
from plimsoll_simulator.replica import Admission, DoesNotStart, EngineSettings, ReplicaState, fit
from plimsoll_simulator.simulation import Controller, Fleet, NoController
from plimsoll_simulator.tuner import Tuner, tuning_settings

LONG_LANE = 8192
_LANE_SHARE = 0.70
_WATERMARK = 0.05
# What a name of a policy ends in when long prompts that wait have a bound, and that bound.
QUEUED = "+queue"
_QUEUE_SHARE = 0.5
# What vLLM's auto_tune.sh tries, in its order.
_AUTO_TUNE = tuple(percent / 100 for percent in range(98, 89, -1))
# The floor that the evaluated spec guarantees, in tokens.
TUNED_FLOOR = 8192


class PolicyError(ValueError):
    """No such policy."""


@dataclass(frozen=True)
class Policy:
    name: str
    description: str
    settings: EngineSettings
    # Of one run: policies have a memory.
    controller: Callable[[], Controller] = NoController


@dataclass(frozen=True)
class Pinned:
    """One setting of the oracle's grid; ``length`` None: native; ``lane`` None: none, else the share
    that prompts above 8k may hold."""

    utilization: float
    length: int | None
    watermark: float
    lane: float | None

    @property
    def name(self) -> str:
        length = "native" if self.length is None else self.length
        lane = "off" if self.lane is None else f"{self.lane:.2f}"
        return f"pinned/{self.utilization:.2f}/{length}/{self.watermark:.2f}/{lane}"

    @property
    def description(self) -> str:
        length = "native length" if self.length is None else f"length {self.length}"
        lane = "" if self.lane is None else f", prompts above 8k hold {self.lane:.0%} at most"
        return f"{self.utilization:.2f}, {length}, watermark {self.watermark:.2f}{lane}"

    @property
    def settings(self) -> EngineSettings:
        """A native length that does not fit becomes the longest that does."""
        return EngineSettings(
            self.utilization,
            max_model_len=self.length,
            fits_length=self.length is None,
            watermark=self.watermark,
            long_prompt_tokens=None if self.lane is None else LONG_LANE,
            long_prompt_share=1.0 if self.lane is None else self.lane,
        )

    @staticmethod
    def parse(name: str) -> Pinned:
        """The reverse of ``name``."""
        _, utilization, length, watermark, lane = name.split("/")
        return Pinned(
            float(utilization),
            None if length == "native" else int(length),
            float(watermark),
            None if lane == "off" else float(lane),
        )


_NATIVE = {
    "S1": ("0.90, native length", EngineSettings(0.90)),
    "S2": ("0.92, native length (vLLM's default)", EngineSettings(0.92)),
    "S3": ("0.98, native length", EngineSettings(0.98)),
    "S4": ("0.88, length 8192", EngineSettings(0.88, max_model_len=8192)),
    "S5": ("0.92, watermark 0.05", EngineSettings(0.92, watermark=_WATERMARK)),
    "S6": ("0.92, longest length that fits", EngineSettings(0.92, fits_length=True)),
    "S8": (
        "0.92, prompts above 8k hold 70 % at most, watermark 0.05",
        EngineSettings(
            0.92,
            fits_length=True,
            watermark=_WATERMARK,
            long_prompt_tokens=LONG_LANE,
            long_prompt_share=_LANE_SHARE,
        ),
    ),
    "S10": (
        "0.92, admission by the peak that past outputs foretell",
        EngineSettings(0.92, fits_length=True, admission=Admission.PAST_OUTPUTS),
    ),
    "O2": (
        "0.92, admission by the peak that the true outputs make",
        EngineSettings(0.92, fits_length=True, admission=Admission.TRUE_OUTPUTS),
    ),
}
BASELINES = ("S1", "S2", "S3", "S4", "S5", "S6", "S7", "S8", "S9", "S10")
# Beside the baselines: it knows what nobody can.
CLAIRVOYANT = "O2"
PLIMSOLL = "plimsoll"
REFERENCE = "S2"


def build_policy(
    name: str, hardware: Hardware, model: Model, *, seed: int = 0, factor: float = 1.0
) -> Policy:
    """``seed`` and ``factor`` matter to S7 alone, which finds its setting by starting engines."""
    if name.endswith(QUEUED):
        return _with_queue(
            build_policy(name.removesuffix(QUEUED), hardware, model, seed=seed, factor=factor)
        )
    if name in _NATIVE:
        description, settings = _NATIVE[name]
        return Policy(name, description, settings)
    if name == "S7":
        return _auto_tuned(hardware, model, seed, factor)
    if name == "S9":
        return Policy(
            name,
            "0.92, then the vertical pod autoscaler's rule",
            EngineSettings(0.92, fits_length=True),
            VerticalAutoscaler,
        )
    if name == PLIMSOLL:
        start = EngineSettings(0.90, fits_length=True)
        return Policy(
            name,
            f"0.90, tuned between 0.80 and 0.94, floor {TUNED_FLOOR}",
            start,
            lambda: Tuner(tuning_settings(start, TUNED_FLOOR)),
        )
    if name.startswith("pinned/"):
        pinned = Pinned.parse(name)
        return Policy(name, pinned.description, pinned.settings)
    expected = ", ".join((*BASELINES, PLIMSOLL))
    raise PolicyError(f"policy {name!r} is not known; expected one of {expected}")


def _with_queue(policy: Policy) -> Policy:
    """The bound is the engine's own flag, which no policy moves."""
    return replace(
        policy,
        name=f"{policy.name}{QUEUED}",
        description=f"{policy.description}; long prompts of {_QUEUE_SHARE:.0%} of the cache may wait",
        settings=replace(policy.settings, long_queue_share=_QUEUE_SHARE),
    )


def startable(policy: Policy, hardware: Hardware, model: Model) -> tuple[Policy, bool]:
    """The policy, with the longest length that fits where its own does not start; and whether its
    own does."""
    try:
        fit(hardware, model, policy.settings)
    except DoesNotStart:
        return replace(policy, settings=replace(policy.settings, fits_length=True)), False
    return policy, True


def _auto_tuned(hardware: Hardware, model: Model, seed: int, factor: float) -> Policy:
    """The highest utilization that starts, each tried once."""
    memory = DeviceMemory(hardware, model, seed=f"auto_tune {seed}", factor=factor)
    chosen = _AUTO_TUNE[-1]
    for utilization in _AUTO_TUNE:
        memory.start(0.0, 0)
        if memory.held(0.0, pool_blocks(hardware, model, utilization)) <= hardware.total_bytes:
            chosen = utilization
            break
    description = f"{chosen:.2f}, the highest of auto_tune.sh that starts"
    return Policy("S7", description, EngineSettings(chosen))


class VerticalAutoscaler:
    """The recommender's memory rule with the line for the request: 1.15 times the 90th percentile
    of daily peaks; after an OOM the sample is the larger of 100 MB more and 1.2 times as much. A
    pod is replaced after 12 h, or after an OOM, and when the change is 10 % and more."""

    _AGE = 12 * 3600.0
    _MARGIN = 1.15
    _CHANGE = 0.10
    _LOWEST, _HIGHEST = 0.80, 0.98

    def __init__(self) -> None:
        self._peak = 0.0

    def observe(self, now: float, fleet: Fleet, deaths: Sequence[Death]) -> None:
        killed = {d.replica for d in deaths if d.cause is DeathCause.OOM}
        for replica in fleet.replicas:
            total = replica.hardware.total_bytes
            if replica.state is ReplicaState.SERVING:
                free = replica.memory.free(now, replica.committed)
                # What the cache could give back is not in use.
                idle = (replica.committed - replica.pool.used) * replica.memory.block_bytes
                self._peak = max(self._peak, float(total - free - idle))
            if replica.name in killed:
                self._peak = max(self._peak + 100_000_000, self._peak * 1.2)
            due = replica.name in killed or now - replica.started_at >= self._AGE
            before = fleet.settings_of(replica).utilization
            wanted = min(max(self._MARGIN * self._peak / total, self._LOWEST), self._HIGHEST)
            wanted = round(wanted, 2)
            if not due or abs(wanted - before) < self._CHANGE * before:
                continue
            fleet.note(Move(now, "gpuMemoryUtilization", before, wanted, "recommendation"))
            settings = replace(fleet.settings_of(replica), utilization=wanted)
            if replica.state is ReplicaState.SERVING:
                fleet.restart(replica, settings, now)
            else:
                fleet.use_at_start(replica, settings)
