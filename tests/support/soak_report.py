"""What came of a soak (soak.py): what was done, how the process's memory went, and what went wrong."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MAX_FAULTS = 20
FAULT_LENGTH = 600


@dataclass
class Report:
    seed: int
    seconds: float = 0.0
    answered: Counter[str] = field(default_factory=Counter)
    cancelled: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    limits: Counter[str] = field(default_factory=Counter)
    steps: float = 0
    preemptions: float = 0
    allocation_failures_caught: float = 0
    prefix_cache_hits: float = 0
    # Bytes, one a round of the watcher.
    resident: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def fault(self, text: str) -> None:
        # The first ones say it all.
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(text[:FAULT_LENGTH])
            print(f"FAULT: {self.faults[-1]}", flush=True)

    def growth(self) -> int:
        """Bytes gained since a fifth of the time had passed, as medians of tenths."""
        tenth = len(self.resident) // 10
        if not tenth:
            return 0
        early, late = self.resident[2 * tenth : 3 * tenth], self.resident[-tenth:]
        return int(statistics.median(late) - statistics.median(early))

    def summary(self) -> dict[str, Any]:
        mib = [round(each / (1 << 20)) for each in self.resident]
        return {
            **{name: value for name, value in vars(self).items() if name != "resident"},
            "resident_mib": {"least": min(mib, default=0), "most": max(mib, default=0)},
            "growth_mib": round(self.growth() / (1 << 20), 1),
        }
