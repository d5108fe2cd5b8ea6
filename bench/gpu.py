"""What the engine makes of one GPU, in ten minutes: kernels, throughput, overhead, live resizing, a burst.

    python bench/gpu.py --json gpu.json        on a machine with a CUDA device
    python bench/gpu.py --smoke                on any: tiny shapes, kernels in Triton's interpreter

Sections, each in a process of its own, so that one that dies costs no other:

    device      bytes a second of a copy, operations a second of a matrix product
    decode      decode attention: keys and values read a second, as a share of the copy
    prefill     causal prefill attention beside torch's scaled dot product attention
    overhead    what a decode step takes beside the model, with recorded steps and without
    resize      seconds for a GiB by which the pool shrinks and grows while a request runs
    serve-...   output tokens a second of random weights on nano-vllm's workload, and of the roofline
    burst-...   long prompts under a ballast that leaves 24 GB, the line pinned at 0.98, then tuned

The figures of a smoke run mean nothing. Exits 1 where a section failed or, but for a smoke run, a goal
was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpu_scale import FULL, SMOKE, Scale

DECODE_SHARE = 0.75
PREFILL_SHARE = 0.50
ROOFLINE_SHARE = 0.50


@dataclass(frozen=True)
class Verdict:
    goal: str
    held: bool


def measures(scale: Scale, device: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """What each section runs, by name, in order; ``device`` is the first one's result."""
    # Imported where something is measured: torch and Triton look at the environment.
    import gpu_burst
    import gpu_engine
    import gpu_kernels

    bandwidth, flops = device.get("copy_bytes_per_second", 0.0), device.get("matmul_flops", 0.0)
    return {
        "device": partial(gpu_kernels.measure_device, scale),
        "decode": partial(gpu_kernels.measure_decode, scale, bandwidth),
        "prefill": partial(gpu_kernels.measure_prefill, scale),
        "overhead": partial(gpu_engine.measure_overhead, scale),
        "resize": partial(gpu_engine.measure_resizing, scale),
        **{
            f"serve-{shape.name}": partial(
                gpu_engine.measure_throughput, scale, shape, bandwidth, flops
            )
            for shape in scale.served
        },
        "burst-pinned": partial(gpu_burst.measure_burst, scale, False),
        "burst-tuned": partial(gpu_burst.measure_burst, scale, True),
    }


def section_names(scale: Scale) -> list[str]:
    served = [f"serve-{shape.name}" for shape in scale.served]
    return [
        *("device", "decode", "prefill", "overhead", "resize"),
        *served,
        *("burst-pinned", "burst-tuned"),
    ]


def judge(name: str, result: Any) -> Iterator[Verdict]:
    """The goals of a section, and whether they were held."""
    if name == "decode":
        for row in result:
            if row["batch"] >= 64 and row["context"] >= 1024:
                share = row["share_of_copy"]
                yield Verdict(
                    f"batch {row['batch']}, context {row['context']}: {share:.0%} of the copy, "
                    f"at least {DECODE_SHARE:.0%}",
                    share >= DECODE_SHARE,
                )
    elif name == "prefill":
        for row in result:
            share = row["share_of_sdpa"]
            yield Verdict(
                f"{row['length']} tokens: {share:.0%} of SDPA, at least {PREFILL_SHARE:.0%}",
                share >= PREFILL_SHARE,
            )
    elif name.startswith("serve-"):
        share = result["share_of_roofline"]
        yield Verdict(
            f"{share:.0%} of the roofline, at least {ROOFLINE_SHARE:.0%}", share >= ROOFLINE_SHARE
        )
    elif name == "burst-tuned":
        caught, failure = result["allocation_failures_caught"], result["failure"]
        yield Verdict(
            f"{caught} failed allocations, {failure or 'no failure'}: neither is allowed",
            failure is None and caught == 0,
        )


class Run:
    """Runs sections as child processes until the time is up."""

    def __init__(self, smoke: bool, seconds: float) -> None:
        self._smoke = smoke
        self._end = time.monotonic() + seconds
        self.device: dict[str, Any] = {}

    def section(self, name: str) -> dict[str, Any]:
        """{"seconds", and "result" or "error"}"""
        left = self._end - time.monotonic()
        if left <= 0:
            return {"seconds": 0.0, "error": "not begun: the time is up (--minutes)"}
        command = [sys.executable, __file__, "--child", name, "--device", json.dumps(self.device)]
        environment = dict(os.environ)
        if self._smoke:
            command.append("--smoke")
            environment["TRITON_INTERPRET"] = "1"
        start = time.monotonic()
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=left, check=False
            )
        except subprocess.TimeoutExpired:
            return {"seconds": left, "error": "not finished in time (--minutes)"}
        seconds = time.monotonic() - start
        if done.returncode != 0:
            return {"seconds": seconds, "error": done.stderr.strip()[-2000:]}
        result = json.loads(done.stdout.splitlines()[-1])
        if name == "device":
            self.device = result
        return {"seconds": seconds, "result": result}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    scale = SMOKE if arguments.smoke else FULL
    if arguments.ballast:
        from gpu_burst import hold_ballast

        kind, free, more = arguments.ballast
        hold_ballast(kind, int(free), int(more))
        return 0
    if arguments.child:
        print(json.dumps(measures(scale, json.loads(arguments.device))[arguments.child]()))
        return 0
    names = section_names(scale)
    if arguments.sections:
        asked = arguments.sections.split(",")
        unknown = sorted({*asked} - {*names})
        if unknown:
            print(f"--sections: {', '.join(unknown)}; allowed: {', '.join(names)}", file=sys.stderr)
            return 2
        # The others are told of shares of what the first one measures.
        names = [name for name in names if name in asked or name == "device"]
    run = Run(arguments.smoke, 60 * arguments.minutes)
    results = {}
    missed = False
    for name in names:
        results[name] = run.section(name)
        missed |= report(name, results[name], arguments.smoke)
        if arguments.json:
            document = {"smoke": arguments.smoke, "sections": results}
            Path(arguments.json).write_text(json.dumps(document, indent=1))
    return 1 if missed else 0


def report(name: str, section: Mapping[str, Any], smoke: bool) -> bool:
    """Prints it; whether something was missed."""
    print(f"== {name} ({section['seconds']:.0f} s)", flush=True)
    if "error" in section:
        print(f"failed: {section['error']}")
        return True
    result = section["result"]
    for row in result if isinstance(result, list) else [result]:
        print("  " + ", ".join(f"{key} {format_value(value)}" for key, value in row.items()))
    if smoke:
        return False
    verdicts = list(judge(name, result))
    for verdict in verdicts:
        print(f"  {'held' if verdict.held else 'MISSED'}: {verdict.goal}")
    return not all(verdict.held for verdict in verdicts)


def format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--sections", metavar="A,B", help="these alone (and device)")
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything (10)")
    parser.add_argument("--json", metavar="FILE", help="write every figure there")
    # What the program starts itself with.
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="{}", help=argparse.SUPPRESS)
    parser.add_argument("--ballast", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
