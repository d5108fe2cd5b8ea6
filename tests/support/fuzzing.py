"""How long the fuzz tests look: a fixed set of examples in the suite, other ones with `make fuzz`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# How many times as many examples; set by `make fuzz`.
FACTOR = int(os.environ.get("FUZZ_FACTOR", "0"))


def fuzz_settings(examples: int) -> settings:
    return settings(
        max_examples=examples * max(1, FACTOR),
        # In the suite the same ones each time.
        derandomize=FACTOR == 0,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
