"""Values for tests of the tuner: readings, settings and a fleet that lives from pass to pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from plimsoll_operator.spec import TuningMode
from plimsoll_operator.tuning import decide
from plimsoll_operator.tuning.values import (
    LANE,
    EngineReading,
    Failure,
    FailureClass,
    Learned,
    Limits,
    LimitsOutcome,
    Parameter,
    Settings,
    Status,
    TuningDecision,
    TuningInputs,
    TuningState,
    Unknown,
    Verdict,
)

MIB = 1024 * 1024
TOTAL = 1200 * MIB
INTERVAL = 5.0
START = 1_000_000.0

FULL = {"kv_cache_usage": 0.97, "waiting": 12, "running": 6}
MILD = {"kv_cache_usage": 0.92, "waiting": 3, "running": 6}
CALM = {"kv_cache_usage": 0.20, "waiting": 0, "running": 1}
# A cache that takes what the line leaves: 100 blocks of 16 tokens per hundredth of utilisation.
PLAN = {"planned_bytes": {"kv_cache": 600 * MIB}, "block_size": 16}


def settings(**changes: Any) -> Settings:
    """A deployment on CPU: 0.90 and 8192 tokens, the length between 1024 and 8192. The long lane
    is pinned by flags, so that the other rules can be seen alone; ``with_lane`` has it."""
    default = Settings(
        mode=TuningMode.AUTO,
        start=Limits(max_model_len=8192, gpu_memory_utilization=0.90),
        min_utilization=0.50,
        max_utilization=0.90,
        tunes_length=True,
        floor=1024,
        ceiling=8192,
        block_size=16,
        on_cpu=True,
        memory_limit="1200Mi",
        time_to_first_token=2.0,
        scrape_interval=INTERVAL,
        generation=1,
        pinned=frozenset(LANE),
    )
    return replace(default, **changes)


def with_lane(**changes: Any) -> Settings:
    """The same with the long lane, as every deployment has it that does not pin it."""
    return settings(**({"pinned": frozenset()} | changes))


def reading(pod: str = "m-0", at: float = START, **changes: Any) -> EngineReading:
    """An idle engine with memory to spare."""
    default = EngineReading(
        pod=pod,
        at=at,
        kv_cache_usage=0.10,
        waiting=0,
        running=1,
        preemptions_total=0.0,
        started_at=START - 600,
        steps_total=at,
        queue_seconds_total=0.0,
        queued_requests_total=0.0,
        allocation_failures_total=0.0,
        device_total_bytes=TOTAL,
        device_free_bytes=200 * MIB,
        device_free_low_water_bytes=120 * MIB,
        max_model_len_ceiling=8192,
    )
    return replace(default, **changes)


@dataclass
class Fleet:
    """Runs pass after pass, ``interval`` apart. Every engine takes over new limits at once, unless
    ``follows`` is False; what ``look`` is given shows on the page of ``m-0``."""

    settings: Settings = field(default_factory=settings)
    learned: Learned = field(default_factory=Learned)
    state: TuningState = field(default_factory=TuningState)
    now: float = START
    follows: bool = True
    interval: float = INTERVAL
    log: list[TuningDecision] = field(default_factory=list)

    def look(self, **page: Any) -> TuningDecision:
        return self.see({"m-0": self.page("m-0", **page)})

    def page(self, pod: str, **page: Any) -> EngineReading:
        limits = self.state.limits
        seen = {
            "limits_revision": self.state.revision if self.follows else 0,
            "gpu_memory_utilization": limits.gpu_memory_utilization or 0.90,
            "max_model_len_admitted": limits.max_model_len,
        }
        return reading(pod, self.now, **(seen | page))

    def see(
        self,
        engines: Mapping[str, EngineReading | Unknown],
        failures: Iterable[Failure] = (),
        outcomes: Mapping[str, LimitsOutcome] | None = None,
    ) -> TuningDecision:
        decision = decide(
            TuningInputs(
                settings=self.settings,
                engines=engines,
                failures=tuple(failures),
                state=self.state,
                learned=self.learned,
                now=self.now,
                outcomes=outcomes or {},
            )
        )
        self.state, self.learned = decision.state, decision.learned
        self.log.append(decision)
        self.now += self.interval
        return decision

    def idle(self, seconds: float, **page: Any) -> TuningDecision:
        """Looks at the same page until ``seconds`` have passed."""
        decision = self.look(**page)
        for _ in range(int(seconds / self.interval)):
            decision = self.look(**page)
        return decision

    @property
    def lengths(self) -> list[int | None]:
        """The admitted length of each pass, without repetitions."""
        return _changes([decision.limits.max_model_len for decision in self.log])

    def values(self, parameter: Parameter) -> list[float | None]:
        """A limit in each pass, without repetitions."""
        return _changes([decision.limits.value(parameter) for decision in self.log])

    @property
    def utilizations(self) -> list[float | None]:
        return _changes([decision.limits.gpu_memory_utilization for decision in self.log])


def _changes(values: list[Any]) -> list[Any]:
    return [value for index, value in enumerate(values) if index == 0 or values[index - 1] != value]


def verdict(decision: TuningDecision, condition: str) -> Verdict:
    return next(found for found in decision.verdicts if found.type == condition)


def holds(decision: TuningDecision, condition: str) -> bool:
    return verdict(decision, condition).status is Status.TRUE


def events(fleet: Fleet) -> list[str]:
    return [event.reason for decision in fleet.log for event in decision.events]


def died(
    failure_class: FailureClass, at: float, *, pod: str = "m-0", number: int = 1, **changes: Any
) -> Failure:
    default = Failure(failure_class, f"uid-{pod}/{number}", pod, "it died", at=at)
    return replace(default, **changes)
