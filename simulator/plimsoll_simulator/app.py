"""The commands. In: arguments. Out: tables, files, an exit status (1: a gate failed, 2: bad input)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from plimsoll_simulator import gates as gate_checks
from plimsoll_simulator.evaluation import Cell, Result, default_cache_dir, workload_of
from plimsoll_simulator.evaluation import evaluate as run_cells
from plimsoll_simulator.hardware import SHAPES
from plimsoll_simulator.policies import BASELINES, PLIMSOLL, PolicyError
from plimsoll_simulator.results import build_tables, format_json
from plimsoll_simulator.traces import TraceError
from plimsoll_simulator.workload import InjectionError

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


@app.command()
def evaluate(
    trace: Annotated[list[Path], typer.Option(help="CSV, plain or .gz; may be given again.")],
    inject: Annotated[str, typer.Option(help="B0 to B9.")] = "B0",
    baselines: Annotated[str, typer.Option(help="all, none, or names like S2,S8.")] = "all",
    seeds: Annotated[int, typer.Option(min=1)] = 20,
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "a100-40gb",
    keep: Annotated[float, typer.Option(help="Share of the trace's requests that is kept.")] = 1.0,
    rate: Annotated[float | None, typer.Option(help="Injected requests per second.")] = None,
    factor: Annotated[float, typer.Option(min=0, help="Scales fragmentation.")] = 1.0,
    replicas: Annotated[int, typer.Option(min=1)] = 1,
    seconds: Annotated[float | None, typer.Option(min=60, help="Length of a run.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="File for all figures.")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Where results are kept.")] = None,
    processes: Processes = _PROCESSES,
) -> None:
    """Run Plimsoll's tuner and pinned settings on the same traffic, and compare them."""
    try:
        policies = (*_read_baselines(baselines), PLIMSOLL)
        if gpu not in SHAPES:
            raise InjectionError(f"--gpu is {gpu!r}; expected one of {', '.join(SHAPES)}")
        evaluations = [
            [
                Cell(path, keep, inject, rate, seconds, gpu, replicas, factor, policy, seed)
                for seed in range(seeds)
                for policy in policies
            ]
            for path in trace
        ]
        for cells in evaluations:
            workload_of(cells[0])
    except (TraceError, InjectionError, PolicyError, OSError) as error:
        Console(stderr=True).print(f"[red]error:[/red] {error}", soft_wrap=True)
        raise typer.Exit(2) from None
    everything: list[Result] = []
    with progress_bar() as bar:
        task = bar.add_task("runs", total=sum(map(len, evaluations)))
        for cells in evaluations:
            results = run_cells(
                cells,
                cache_dir=cache_dir or default_cache_dir(),
                processes=processes,
                progress=lambda result, cached: bar.advance(task),
            )
            everything += results
    for path, cells in zip(trace, evaluations, strict=True):
        results = [result for result in everything if result.cell in set(cells)]
        for table in build_tables(results, f"{path.name}, {inject}, {gpu}, simulated"):
            Console().print(table)
    if json_out is not None:
        json_out.write_text(format_json(everything), encoding="utf-8")


def _read_baselines(text: str) -> tuple[str, ...]:
    if text == "all":
        return BASELINES
    names = tuple(name for name in text.split(",") if name and text != "none")
    for name in names:
        if name not in BASELINES:
            raise PolicyError(
                f"--baselines has {name!r}; expected all, none, or names of {', '.join(BASELINES)}"
            )
    return names


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
