"""Means, paired differences, worst seeds; results that are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plimsoll_simulator.app import app
from plimsoll_simulator.comparison import bootstrap, compare
from plimsoll_simulator.evaluation import Cell, Result, evaluate


def test_the_interval_holds_the_mean_and_is_the_same_each_time() -> None:
    values = [0.1, 0.4, 0.5, 0.9]
    interval = bootstrap(values)
    assert interval.mean == pytest.approx(0.475)
    assert interval.low < interval.mean < interval.high
    assert interval == bootstrap(values)
    assert bootstrap([0.3]).low == pytest.approx(0.3)


def test_differences_are_paired_by_seed() -> None:
    """Seeds differ a lot, the policies always by the same: an unpaired interval would be wide."""
    base = {0: 0.1, 1: 0.5, 2: 0.9}
    better = {seed: value + 0.05 for seed, value in base.items()}
    reference, other = compare({"S2": base, "other": better}, "S2")
    assert reference.difference is None
    assert other.difference is not None
    assert other.difference.low == pytest.approx(0.05)
    assert other.difference.high == pytest.approx(0.05)
    assert other.worst_seed == 0
    assert other.worst == pytest.approx(0.15)


def write_trace(path: Path, requests: int = 60) -> Path:
    rows = "".join(f"{n},400,20\n" for n in range(requests))
    path.write_text(f"t_s,input_tokens,output_tokens\n{rows}", encoding="utf-8")
    return path


def cell(trace: Path, seed: int, policy: str = "S2") -> Cell:
    return Cell(trace, 1.0, "B0", None, 60.0, "a100-40gb", 1, 1.0, policy, seed)


def test_a_result_is_kept_until_its_trace_changes(tmp_path: Path) -> None:
    trace, seen = write_trace(tmp_path / "mine.csv"), list[bool]()

    def run(trace: Path) -> list[Result]:
        return evaluate(
            [cell(trace, seed) for seed in range(2)],
            cache_dir=tmp_path / "kept",
            processes=1,
            progress=lambda result, cached: seen.append(cached),
        )

    first = run(trace)
    assert seen == [False, False]
    assert run(trace) == first
    assert seen[2:] == [True, True]
    moved = tmp_path / "elsewhere.csv"
    moved.write_bytes(trace.read_bytes())
    run(moved)
    assert seen[4:] == [True, True]
    # A broken file is made again.
    next(iter((tmp_path / "kept").iterdir())).write_text("{", encoding="utf-8")
    assert run(trace) == first


def test_another_trace_of_the_same_name_is_run_anew(tmp_path: Path) -> None:
    seen = list[bool]()
    for folder, requests in (("a", 60), ("b", 30)):
        (tmp_path / folder).mkdir()
        trace = write_trace(tmp_path / folder / "mine.csv", requests)
        evaluate(
            [cell(trace, 0)],
            cache_dir=tmp_path / "kept",
            processes=1,
            progress=lambda result, cached: seen.append(cached),
        )
    assert seen == [False, False]


def test_the_command_writes_what_it_shows(tmp_path: Path) -> None:
    trace, out = write_trace(tmp_path / "mine.csv"), tmp_path / "out.json"
    arguments = ["--trace", str(trace), "--baselines", "S2", "--seeds", "2", "--seconds", "60"]
    files = ["--json", str(out), "--cache-dir", str(tmp_path / "kept"), "--processes", "1"]
    shown = CliRunner().invoke(app, ["evaluate", *arguments, *files])
    assert shown.exit_code == 0, shown.output
    assert "plimsoll" in shown.output
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["simulated"] is True
    assert len(written["cells"]) == 4
    assert written["comparisons"]["mine.csv"]["reference"] == "S2"
    assert str(tmp_path) not in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--trace", "missing.csv"], "missing.csv"),
        (["--trace", "TRACE", "--inject", "B10"], "--inject is 'B10'"),
        (["--trace", "TRACE", "--gpu", "H9000"], "--gpu is 'H9000'; expected one of rtx4090-24gb"),
        (["--trace", "TRACE", "--baselines", "S2,X"], "--baselines has 'X'"),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, arguments: list[str], expected: str) -> None:
    trace = str(write_trace(tmp_path / "mine.csv"))
    given = [trace if argument == "TRACE" else argument for argument in arguments]
    shown = CliRunner().invoke(app, ["evaluate", *given])
    assert shown.exit_code == 2
    assert expected in shown.output
