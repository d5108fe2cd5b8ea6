"""The commands. In: arguments. Out: tables, files, an exit status (1: a gate failed, 2: bad input)."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from plimsoll_simulator import gates as gate_checks

app = typer.Typer(
    help="Replays request traces over the real scheduler and tuner, in virtual time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_PROCESSES = len(os.sched_getaffinity(0))
Processes = Annotated[int, typer.Option(min=1, help="Processes to use.")]


@app.callback()
def main() -> None:
    """Replays request traces over the real scheduler and tuner, in virtual time."""


@app.command()
def gates(
    seeds: Annotated[int, typer.Option(min=1, help="Workloads drawn for gate G3.")] = 3,
    processes: Processes = _PROCESSES,
) -> None:
    """Compare the simulator with real measurements; exit with 1 when one is not met."""
    with progress_bar() as bar:
        task = bar.add_task("gates")
        replays = gate_checks.replay_all(
            seeds, processes, lambda done, of: bar.update(task, completed=done, total=of)
        )
    found = gate_checks.judge(replays)
    table = Table(title="Simulator against measurement")
    for column in ("gate", "figure", "measured", "simulated", "allowed", "verdict"):
        table.add_column(column, overflow="fold")
    for gate in found:
        verdict = "held" if gate.holds else "FAILED"
        table.add_row(gate.name, gate.figure, gate.measured, gate.simulated, gate.allowed, verdict)
    Console().print(table)
    if not all(gate.holds for gate in found):
        raise typer.Exit(1)


def progress_bar() -> Progress:
    """On stderr, and only where somebody looks."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
