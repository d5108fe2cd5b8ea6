"""How the burst looks while it runs: a table on a terminal, a line every ten seconds elsewhere.

In:  for each deployment its client's Progress and the newest Reading.
Out: rich renderables and plain lines. Pure but for `show`, which holds the terminal.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from plimsoll_local.demo.client import Progress
from plimsoll_local.demo.outcomes import Outcome
from plimsoll_local.demo.watch import Reading

PLAIN_INTERVAL_S = 10.0
LIVE_INTERVAL_S = 0.5
BAR_CELLS = 20
SHOWN_DECISIONS = 5
MIB = 1024 * 1024


@dataclass
class Side:
    """One deployment on the screen; progress and reading change while it is shown."""

    title: str
    progress: Progress
    reading: Reading | None = None
    lowest_free_bytes: int | None = None

    def note(self, reading: Reading) -> None:
        self.reading = reading
        # The engine's own figure is that of its last minute.
        free = reading.gauges.free_bytes_low_water
        known = [value for value in (self.lowest_free_bytes, free) if value is not None]
        self.lowest_free_bytes = min(known, default=None)


async def show(console: Console, sides: Sequence[Side], elapsed_s: Callable[[], float]) -> None:
    """Shows the sides until cancelled."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(render(sides, elapsed_s()), refresh=True)
                await asyncio.sleep(LIVE_INTERVAL_S)
    while True:
        for side in sides:
            console.print(describe(side, elapsed_s()), soft_wrap=True, highlight=False)
        await asyncio.sleep(PLAIN_INTERVAL_S)


def render(sides: Sequence[Side], elapsed_s: float) -> RenderableType:
    """The table of both sides and, below it, what the tuner did last and why."""
    table = Table(title=f"Burst, second {elapsed_s:.0f}", title_justify="left", expand=False)
    table.add_column("")
    for side in sides:
        table.add_column(side.title, min_width=34)
    for name, cell in ROWS:
        table.add_row(name, *(cell(side) for side in sides))
    decisions = [
        Text(f"{side.title}: {line}", overflow="fold")
        for side in sides
        for line in describe_decisions(side.reading)[-SHOWN_DECISIONS:]
    ]
    return Group(table, *decisions)


def describe(side: Side, elapsed_s: float) -> str:
    """One plain line with what the table shows."""
    facts = ", ".join(f"{name} {cell(side)}" for name, cell in ROWS[1:] if cell(side) != "-")
    last = describe_decisions(side.reading)[-1:]
    return f"{elapsed_s:4.0f}s {side.title}: {facts}" + (f"; last: {last[0]}" if last else "")


def describe_decisions(reading: Reading | None) -> list[str]:
    """The tuner's changes, one sentence each."""
    if reading is None:
        return []
    return [
        f"{decision.parameter} {decision.before} -> {decision.after}: {decision.reason}"
        for decision in reading.decisions
    ]


def _serving(side: Side) -> str:
    reading = side.reading
    if reading is None or reading.ready is None:
        return "-"
    ready, wanted = reading.ready
    return f"{ready} of {wanted} ready"


def _clients(side: Side) -> str:
    progress = side.progress
    parts = [
        f"{progress.sent} of {progress.total} sent",
        f"{progress.count(Outcome.ANSWERED)} answered",
    ]
    parts += [
        f"{progress.count(outcome)} {outcome.value}"
        for outcome in (Outcome.FAILED, Outcome.REFUSED, Outcome.GAVE_UP)
        if progress.count(outcome)
    ]
    if progress.refusals:
        parts.append(f"{progress.refusals} x 429")
    return " / ".join(parts)


def _kv(side: Side) -> str:
    usage = side.reading.gauges.kv_usage if side.reading else None
    if usage is None:
        return "-"
    filled = round(min(usage, 1.0) * BAR_CELLS)
    return f"{'#' * filled}{'.' * (BAR_CELLS - filled)} {usage:4.0%}"


def _queue(side: Side) -> str:
    gauges = side.reading.gauges if side.reading else None
    if gauges is None or gauges.running is None or gauges.waiting is None:
        return "-"
    return f"{gauges.running} / {gauges.waiting}"


def _length(side: Side) -> str:
    gauges = side.reading.gauges if side.reading else None
    if gauges is None or gauges.admitted_length is None:
        return "-"
    return f"{gauges.admitted_length} of {gauges.ceiling}"


def _utilization(side: Side) -> str:
    share = side.reading.gauges.utilization if side.reading else None
    return "-" if share is None else f"{share:.2f}"


def _free(side: Side) -> str:
    free = side.reading.gauges.free_bytes_low_water if side.reading else None
    return "-" if free is None else f"{free / MIB:.0f} MiB"


def _kills(side: Side) -> str:
    return "-" if side.reading is None else str(side.reading.oom_kills)


def _restarts(side: Side) -> str:
    return "-" if side.reading is None else str(side.reading.restarts)


ROWS: tuple[tuple[str, Callable[[Side], str]], ...] = (
    ("replicas", _serving),
    ("requests", _clients),
    ("KV cache", _kv),
    ("running/waiting", _queue),
    ("admitted length", _length),
    ("utilisation", _utilization),
    ("free at the tightest", _free),
    ("OOM kills", _kills),
    ("restarts", _restarts),
)
