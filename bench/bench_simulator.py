"""How long an hour of trace takes on one core: CPU seconds per policy.

In: nothing. Out: a table on stdout. Azure's conversations, 40 % of them, with the burst of B1.
"""

from __future__ import annotations

import time
from importlib.resources import as_file, files

from plimsoll_simulator.evaluation import Cell, run

_POLICIES = ("S2", "S8", "plimsoll")


def main() -> None:
    source = files("plimsoll_simulator") / "data" / "azure2023_conv.csv.gz"
    print(f"{'hardware':<14} {'policy':<9} {'steps':>8} {'CPU s':>7} {'us/step':>8}")
    with as_file(source) as trace:
        for hardware in ("rtx4090-24gb", "a100-40gb"):
            for policy in _POLICIES:
                cell = Cell(trace, 0.4, "B1", None, 3600.0, hardware, 1, 1.0, policy, 1)
                start = time.process_time()
                record, _, _ = run(cell)
                spent = time.process_time() - start
                each = 1e6 * spent / record.steps
                print(f"{hardware:<14} {policy:<9} {record.steps:>8} {spent:>7.1f} {each:>8.0f}")


if __name__ == "__main__":
    main()
