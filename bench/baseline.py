"""What paging and continuous batching give, on the engine's own scheduler and block pool.

Three ways of serving the same queue, simulated on one device (Llama-3.1-8B in 16 bits, step times by
a roofline; nothing here was measured on a device):

* contiguous, barrier: each request reserves the maximum length, and a batch is over when its last
  request is; what ended before is neither replaced nor computed any more.
* contiguous, continuous: the same reservation, but whoever waits enters as soon as one ends.
* paged, continuous: the engine as it is.

A contiguous reservation is a block of the maximum length, so all three run the same code. In: the
lengths of the Azure and ShareGPT traces that the simulator brings. Out: a table: the share of reserved
KV slots that hold no token and the requests running at once, both as means over time, and
output tokens per second.
"""

from __future__ import annotations

import argparse
import csv
import gzip
from collections import deque
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from plimsoll_engine.blocks import BlockPool
from plimsoll_engine.sampling_params import Request, SamplingParams
from plimsoll_engine.scheduler import ScheduledStep, Scheduler, SchedulerLimits
from plimsoll_simulator.hardware import A100_40, LLAMA_3_1_8B, pool_blocks
from plimsoll_simulator.hardware import BLOCK_SIZE as PAGE
from plimsoll_simulator.step_time import StepTime, step_time_of
from plimsoll_simulator.traces import Arrival, read_trace

SHAREGPT = "sharegpt_8k"
TRACES = ("azure2023_conv", "azure2023_code", SHAREGPT)
MAX_MODEL_LEN = 8192
MAX_NUM_SEQS = 256
UTILIZATION = 0.9


@dataclass(frozen=True)
class Way:
    name: str
    block_size: int
    barrier: bool


WAYS = (
    Way("contiguous, barrier", MAX_MODEL_LEN, barrier=True),
    Way("contiguous, continuous", MAX_MODEL_LEN, barrier=False),
    Way("paged, continuous", PAGE, barrier=False),
)


@dataclass(frozen=True)
class Outcome:
    """Means over time."""

    unused_share: float
    running: float
    tokens_per_second: float
    preemptions: int


def serve(way: Way, requests: list[Arrival], pool_tokens: int) -> Outcome:
    """Serves a queue that is whole from the start."""
    step_time = step_time_of(A100_40, LLAMA_3_1_8B)
    pool = BlockPool(pool_tokens // way.block_size)
    scheduler = Scheduler(pool, way.block_size, SchedulerLimits(MAX_NUM_SEQS, 2048))
    queue = deque(enumerate(requests))
    now = unused = reserved_time = running_time = 0.0
    batch = produced = preemptions = 0
    while queue or scheduler.running or scheduler.num_waiting:
        if not way.barrier or not scheduler.running:
            batch = min(len(queue), pool.committed, MAX_NUM_SEQS) if way.barrier else len(queue)
            for number, asked in (queue.popleft() for _ in range(batch)):
                params = SamplingParams(max_tokens=asked.output_tokens)
                prompt = (0,) * asked.input_tokens
                scheduler.add(Request(str(number), prompt, params, arrival_time=0.0))
        step = scheduler.schedule()
        seconds = _duration(step, step_time)
        # A batch holds the places of those that ended until it is over.
        reserved = (batch if way.barrier else pool.used) * way.block_size
        held = sum(sequence.computed for sequence in scheduler.running)
        now += seconds
        reserved_time += reserved * seconds
        unused += (reserved - held) * seconds
        running_time += len(scheduler.running) * seconds
        preemptions += len(step.preempted)
        sampled = {
            chunk.sequence.request_id: 0
            for chunk in step.chunks
            if chunk.start + chunk.count == len(chunk.sequence.tokens)
        }
        scheduler.complete(step, sampled)
        produced += len(sampled)
        for chunk in step.chunks:
            if chunk.sequence.num_output_tokens == chunk.sequence.params.max_tokens:
                scheduler.finish(chunk.sequence)
    return Outcome(unused / reserved_time, running_time / now, produced / now, preemptions)


def _duration(step: ScheduledStep, step_time: StepTime) -> float:
    prefills, decoding, held = [], 0, 0
    for chunk in step.chunks:
        if chunk.count > 1:
            prefills.append((chunk.count, chunk.start))
        else:
            decoding += 1
            held += chunk.start + 1
    return step_time(prefills, decoding, held)


def read_lengths(name: str, count: int) -> list[Arrival]:
    """The first ``count`` that fit the maximum length."""
    with as_file(files("plimsoll_simulator") / "data" / f"{name}.csv.gz") as path:
        # The ShareGPT lengths come without arrivals, so they are no trace.
        arrivals = read_sharegpt(path) if name == SHAREGPT else read_trace(path).arrivals
    fitting = (each for each in arrivals if each.input_tokens + each.output_tokens <= MAX_MODEL_LEN)
    return [each for _, each in zip(range(count), fitting, strict=False)]


def read_sharegpt(path: Path) -> tuple[Arrival, ...]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return tuple(
            Arrival(0.0, int(row["num_prefill_tokens"]), max(1, int(row["num_decode_tokens"])))
            for row in csv.DictReader(file)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, help="of each trace (1000)")
    arguments = parser.parse_args()
    pool_tokens = pool_blocks(A100_40, LLAMA_3_1_8B, UTILIZATION) * PAGE
    print(
        f"{LLAMA_3_1_8B.name} on {A100_40.name}, simulated; {pool_tokens} KV slots, maximum length"
    )
    print(f"{MAX_MODEL_LEN}; the first {arguments.requests} requests of each trace, all at once\n")
    print("| lengths | way | reserved but unused | running at once | output tok/s | of the first |")
    print("|---|---|---|---|---|---|")
    for trace in TRACES:
        requests = read_lengths(trace, arguments.requests)
        first = None
        for way in WAYS:
            outcome = serve(way, requests, pool_tokens)
            first = first or outcome.tokens_per_second
            print(
                f"| {trace} | {way.name} | {outcome.unused_share:.1%} | {outcome.running:.1f} "
                f"| {outcome.tokens_per_second:.0f} | {outcome.tokens_per_second / first:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
