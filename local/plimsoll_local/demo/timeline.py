"""How long each step took, with downloads and builds told apart from the demo itself.

In:  named steps as they run. Out: progress lines while they run and a table at the end.
"""

import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from rich.console import Console
from rich.table import Table


class Cost(Enum):
    """Who pays for a step: every run, or only the first one on a machine."""

    EVERY_RUN = "every run"
    FIRST_RUN = "downloads and builds"


@dataclass(frozen=True)
class Step:
    name: str
    cost: Cost
    seconds: float


class Timeline:
    """Collects steps in the order in which they ended."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._steps: list[Step] = []

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(self._steps)

    @contextmanager
    def step(self, name: str, cost: Cost = Cost.EVERY_RUN) -> Iterator[None]:
        """Announces a step and keeps its time, also when it fails."""
        self._console.print(f"[bold]==>[/bold] {name}", highlight=False)
        started = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - started
            self._steps.append(Step(name, cost, seconds))
            self._console.print(f"    {seconds:.1f} s", highlight=False, style="dim")

    def say(self, text: str) -> None:
        """A line or more about the step that is running."""
        lines = textwrap.indent(text, "    ")
        self._console.print(lines, highlight=False, markup=False, soft_wrap=True)

    def total(self, cost: Cost) -> float:
        """Seconds of all steps with this cost."""
        return sum(step.seconds for step in self._steps if step.cost is cost)

    def build_table(self) -> Table:
        table = Table(title="Time by step", title_justify="left")
        table.add_column("step")
        table.add_column("seconds", justify="right")
        for step in self._steps:
            note = "" if step.cost is Cost.EVERY_RUN else f" ({step.cost.value})"
            table.add_row(step.name + note, f"{step.seconds:.1f}")
        table.add_section()
        table.add_row("the demo", f"{self.total(Cost.EVERY_RUN):.1f}")
        table.add_row(Cost.FIRST_RUN.value, f"{self.total(Cost.FIRST_RUN):.1f}")
        return table
