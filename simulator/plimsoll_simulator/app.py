"""The commands. In: arguments. Out: tables, files, an exit status (1: a gate failed, 2: bad input)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from plimsoll_simulator import gates as gate_checks
from plimsoll_simulator import oracle as hindsight
from plimsoll_simulator.evaluation import Cell, Result, default_cache_dir, workload_of
from plimsoll_simulator.evaluation import evaluate as run_cells
from plimsoll_simulator.hardware import (
    LLAMA_3_1_8B,
    SHAPES,
    Model,
    UnknownHardware,
    find_hardware,
)
from plimsoll_simulator.model_config import ModelError, read_model
from plimsoll_simulator.policies import (
    BASELINES,
    CLAIRVOYANT,
    PLIMSOLL,
    QUEUED,
    REFERENCE,
    PolicyError,
    build_policy,
    startable,
)
from plimsoll_simulator.replica import DoesNotStart, fit
from plimsoll_simulator.results import build_tables, format_json, headline
from plimsoll_simulator.traces import TraceError, read_trace
from plimsoll_simulator.workload import InjectionError

app = typer.Typer(
    help="Replays request traces over the real scheduler and tuner, in virtual time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_PROCESSES = len(os.sched_getaffinity(0))
Processes = Annotated[int, typer.Option(min=1, help="Processes to use.")]
TraceFile = Annotated[Path, typer.Option(help="CSV, plain or .gz.")]
Inject = Annotated[str, typer.Option(help="B0 to B9.")]
Gpu = Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")]
ModelConfig = Annotated[
    Path | None, typer.Option(help="config.json of the model (default: Llama-3.1-8B's figures).")
]
Keep = Annotated[float, typer.Option(help="Share of the trace's requests that is kept.")]
Rate = Annotated[float | None, typer.Option(help="Injected requests per second.")]
Factor = Annotated[float, typer.Option(min=0, help="Scales fragmentation.")]
Replicas = Annotated[int, typer.Option(min=1)]
Seconds = Annotated[float | None, typer.Option(min=60, help="Length of a run.")]
Seeds = Annotated[int, typer.Option(min=1)]
JsonOut = Annotated[Path | None, typer.Option("--json", help="File for all figures.")]
CacheDir = Annotated[Path | None, typer.Option(help="Where results are kept.")]
_BAD_INPUT = (
    TraceError,
    InjectionError,
    PolicyError,
    UnknownHardware,
    ModelError,
    DoesNotStart,
    OSError,
)


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
    inject: Inject = "B0",
    baselines: Annotated[str, typer.Option(help="all, none, or names like S2,S8.")] = "all",
    seeds: Seeds = 20,
    gpu: Gpu = "a100-40gb",
    model_config: ModelConfig = None,
    keep: Keep = 1.0,
    rate: Rate = None,
    factor: Factor = 1.0,
    replicas: Replicas = 1,
    seconds: Seconds = None,
    json_out: JsonOut = None,
    cache_dir: CacheDir = None,
    processes: Processes = _PROCESSES,
) -> None:
    """Run Plimsoll's tuner and pinned settings on the same traffic, and compare them."""
    with exit_on_bad_input():
        policies = (*_read_baselines(baselines), PLIMSOLL)
        shape, model = find_hardware(gpu).name, _model(model_config, None)
        first = [
            Cell(path, keep, inject, rate, seconds, shape, replicas, factor, PLIMSOLL, 0, model)
            for path in trace
        ]
        for cell in first:
            check(cell, policies, json_out)
    everything: list[Result] = []
    with progress_bar() as bar:
        task = bar.add_task("runs", total=len(first) * seeds * len(policies))
        for cell in first:
            results = run_cells(
                spread(cell, policies, range(seeds)),
                cache_dir=cache_dir or default_cache_dir(),
                processes=processes,
                progress=lambda result, cached: bar.advance(task),
            )
            everything += results
    for cell in first:
        results = [result for result in everything if result.cell.trace == cell.trace]
        for table in build_tables(results, f"{cell.trace.name}, {inject}, {shape}, simulated"):
            Console().print(table)
    if json_out is not None:
        json_out.write_text(format_json(everything), encoding="utf-8")


@app.command()
def oracle(
    trace: TraceFile,
    inject: Inject = "B0",
    settings: Annotated[int, typer.Option(min=6, max=864, help="How many are looked at.")] = 48,
    search_seeds: Annotated[int, typer.Option(min=1, help="Most seeds of a round.")] = 8,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds that the winner is judged on.")] = 20,
    gpu: Gpu = "a100-40gb",
    model_config: ModelConfig = None,
    keep: Keep = 1.0,
    rate: Rate = None,
    factor: Factor = 1.0,
    replicas: Replicas = 1,
    seconds: Seconds = None,
    json_out: JsonOut = None,
    cache_dir: CacheDir = None,
    processes: Processes = _PROCESSES,
) -> None:
    """Find the best single setting in hindsight (O1), and compare Plimsoll with it on other seeds."""
    with exit_on_bad_input():
        hardware, model = find_hardware(gpu), _model(model_config, None)
        cell = Cell(
            trace, keep, inject, rate, seconds, hardware.name, replicas, factor, PLIMSOLL, 0, model
        )
        check(cell, (REFERENCE, PLIMSOLL), json_out)
        names = [each.name for each in hindsight.draw_settings(hardware, model, settings)]
    total = hindsight.count_runs(len(names), search_seeds) + 3 * seeds
    with progress_bar() as bar:
        task = bar.add_task("runs", total=total)

        def run(cells: Sequence[Cell]) -> list[Result]:
            return run_cells(
                cells,
                cache_dir=cache_dir or default_cache_dir(),
                processes=processes,
                progress=lambda result, cached: bar.advance(task),
            )

        def score(pairs: Iterable[tuple[str, int]]) -> dict[tuple[str, int], float]:
            found = run([replace(cell, policy=name, seed=seed) for name, seed in pairs])
            return {(each.cell.policy, each.cell.seed): headline(each) for each in found}

        rounds = hindsight.search(names, search_seeds, score)
        best = rounds[-1].means[0][0]
        results = run(spread(cell, (REFERENCE, best, PLIMSOLL), range(seeds)))
    Console().print(_rounds_table(rounds))
    for table in build_tables(results, f"O1 of {trace.name}, {inject}, {hardware.name}, simulated"):
        Console().print(table)
    if json_out is not None:
        content = json.loads(format_json(results))
        content["oracle"] = {"best": best, "rounds": [asdict(each) for each in rounds]}
        json_out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@app.command()
def report(
    trace: TraceFile,
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    inject: Inject = "B0",
    baselines: Annotated[str, typer.Option(help="all, none, or names like S2,S8.")] = "S2,S3,S8",
    seeds: Seeds = 3,
    gpu: Gpu = "a100-40gb",
    model_config: ModelConfig = None,
    model_name: Annotated[str | None, typer.Option(help="Its name in the report.")] = None,
    keep: Keep = 1.0,
    rate: Rate = None,
    factor: Factor = 1.0,
    replicas: Replicas = 1,
    seconds: Seconds = None,
    cache_dir: CacheDir = None,
    processes: Processes = _PROCESSES,
) -> None:
    """Draw what Plimsoll would do with a trace: one HTML page, and a few lines here.

    Without --inject and --seconds the trace is replayed once, as long as it is.
    """
    with exit_on_bad_input():
        policies = (*_read_baselines(baselines), PLIMSOLL)
        if inject == "B0" and seconds is None:
            seconds = max(60.0, read_trace(trace).span + 1.0)
        shape, model = find_hardware(gpu).name, _model(model_config, model_name)
        cell = Cell(trace, keep, inject, rate, seconds, shape, replicas, factor, PLIMSOLL, 0, model)
        check(cell, policies, out)
    build_page, describe = _import_report()
    with progress_bar() as bar:
        task = bar.add_task("runs", total=seeds * len(policies))
        results = run_cells(
            spread(cell, policies, range(seeds)),
            cache_dir=cache_dir or default_cache_dir(),
            processes=processes,
            progress=lambda result, cached: bar.advance(task),
        )
    with exit_on_bad_input():
        out.write_text(build_page(results), encoding="utf-8")
    print("\n".join((*describe(results), f"Report: {out}")))


def spread(cell: Cell, policies: Sequence[str], seeds: Iterable[int]) -> list[Cell]:
    """Every policy on a seed before the next seed, so that what is broken off is paired."""
    return [replace(cell, policy=policy, seed=seed) for seed in seeds for policy in policies]


def check(cell: Cell, policies: Sequence[str], out: Path | None) -> None:
    """Everything that can be wrong with the input, before the first run."""
    if not workload_of(cell).requests:
        raise TraceError(f"{cell.trace}: no request is left of it; give a larger --keep")
    hardware = SHAPES[cell.hardware]
    for name in policies:
        policy = build_policy(name, hardware, cell.model, factor=cell.factor)
        # Its own length may be cut; that no length at all fits is the end.
        fit(hardware, cell.model, startable(policy, hardware, cell.model)[0].settings)
    if out is not None and not out.absolute().parent.is_dir():
        raise FileNotFoundError(f"{out}: no folder {out.absolute().parent}")


@contextmanager
def exit_on_bad_input() -> Iterator[None]:
    try:
        yield
    except _BAD_INPUT as error:
        message = escape(str(error))
        Console(stderr=True).print(f"[red]error:[/red] {message}", soft_wrap=True)
        raise typer.Exit(2) from None


def _import_report() -> tuple[
    Callable[[Sequence[Result]], str], Callable[[Sequence[Result]], tuple[str, ...]]
]:
    """Only here: nothing else needs matplotlib, and it takes its time."""
    try:
        from plimsoll_simulator.report import build_page, describe
    except ImportError as error:
        Console(stderr=True).print(
            f"[red]error:[/red] a report needs {error.name}: pip install 'plimsoll\\[simulator]'",
            soft_wrap=True,
        )
        raise typer.Exit(2) from None
    return build_page, describe


def _model(config: Path | None, name: str | None) -> Model:
    return LLAMA_3_1_8B if config is None else read_model(config, name or config.parent.name)


def _read_baselines(text: str) -> tuple[str, ...]:
    if text == "all":
        return BASELINES
    names = tuple(name for name in text.split(",") if name and text != "none")
    for name in names:
        known = (*BASELINES, CLAIRVOYANT, *((PLIMSOLL,) if name.endswith(QUEUED) else ()))
        if name.removesuffix(QUEUED) not in known and not name.startswith("pinned/"):
            raise PolicyError(
                f"--baselines has {name!r}; expected all, none, or names of "
                f"{', '.join(BASELINES)} and {CLAIRVOYANT}, each or {PLIMSOLL} with {QUEUED} at its end"
            )
    return names


def _rounds_table(rounds: Sequence[hindsight.Round]) -> Table:
    table = Table(title="Search for O1: the better half goes on", caption="Means, best first.")
    for column in ("settings", "seeds", "best", "attainment", "last that goes on"):
        table.add_column(column)
    for each, after in zip(rounds, [*rounds[1:], None], strict=True):
        name, mean = each.means[0]
        last = "" if after is None else f"{each.means[len(after.means) - 1][1]:.3f}"
        table.add_row(str(len(each.means)), str(each.seeds), name, f"{mean:.3f}", last)
    return table


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
