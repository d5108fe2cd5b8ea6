"""What the gate adds to a request and to a chunk: the same load on one upstream, with and without it.

Three processes on the loopback address: an upstream that answers at once (this file with
``--serve``), the gate as it is started in a pod, and the client, which alternates between the two
ways from request to request, so that whatever else the machine does falls on both. Prints the
gate's processor time, medians and p99 of each way, the difference of the medians and its spread
over the rounds; exits 1 above the goals (2 ms a request, 0.1 ms a chunk).

The upstream stands for vLLM's HTTP side only: it counts by a table and computes nothing. So the
exact count is measured as a round trip, without the tokenizer's own time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import psutil
import uvloop
from aiohttp import web

GOAL_REQUEST_MS = 2.0
GOAL_CHUNK_MS = 0.1
CHUNK = b'data: {"id":"x","object":"text_completion","choices":[{"index":0,"text":"%020d"}]}\n\n'
# Between two chunks of a stream: far less than a token takes a model of any size.
CHUNK_SECONDS = 0.005
MAX_MODEL_LEN = 32768


@dataclass(frozen=True)
class Ways:
    """Two addresses, and the processor time that the gate has taken, in seconds."""

    direct: str
    gated: str
    gate_seconds: Callable[[], float]


@dataclass(frozen=True)
class Row:
    """One kind of load. Of one with chunks, times are a chunk's on its way."""

    name: str
    body: dict[str, Any]
    chunks: int
    concurrency: int
    # None: no goal.
    goal_ms: float | None
    # That the upstream takes before it answers.
    seconds: float = 0.0


def rows(chunks: int) -> list[Row]:
    ids = {"model": "m", "prompt": [1] * 256, "max_tokens": 128}
    text = {"model": "m", "prompt": "a word " * 150, "max_tokens": 128}
    counted = {"model": "m", "prompt": "a word " * 4600, "max_tokens": 600}
    stream = ids | {"stream": True, "max_tokens": chunks}
    return [
        Row("request, prompt as ids", ids, 0, 1, GOAL_REQUEST_MS),
        Row("request, text within the bound", text, 0, 1, GOAL_REQUEST_MS),
        Row("request, 8050 tokens counted", counted, 0, 1, None),
        Row("request, 16 at once of 50 ms", ids, 0, 16, GOAL_REQUEST_MS, seconds=0.05),
        Row(f"chunk, stream of {chunks}", stream, chunks, 1, GOAL_CHUNK_MS),
        Row("chunk, 8 streams at once", stream, chunks, 8, GOAL_CHUNK_MS),
    ]


# The upstream.


async def models(http: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "m", "max_model_len": MAX_MODEL_LEN}]})


async def metrics(http: web.Request) -> web.Response:
    return web.Response(text="")


async def tokenize(http: web.Request) -> web.Response:
    prompt = (await http.json())["prompt"]
    count = len(prompt) // 4
    return web.json_response(
        {"count": count, "max_model_len": MAX_MODEL_LEN, "tokens": [1] * count}
    )


async def generate(http: web.Request) -> web.StreamResponse:
    asked = await http.json()
    await asyncio.sleep(float(http.headers.get("X-Seconds", 0)))
    if not asked.get("stream"):
        return web.Response(body=CHUNK % 0, content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(http)
    for _ in range(asked["max_tokens"]):
        # All processes of a machine share this clock.
        await response.write(CHUNK % time.monotonic_ns())
        await asyncio.sleep(CHUNK_SECONDS)
    return response


def serve(port: int) -> None:
    app = web.Application(client_max_size=1 << 30)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/metrics", metrics)
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/v1/completions", generate)
    uvloop.install()
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


# The client.


async def ask(client: aiohttp.ClientSession, base: str, row: Row) -> float:
    """Milliseconds of one request; of a stream the median age of a chunk at its arrival."""
    started = time.perf_counter()
    headers = {"X-Seconds": str(row.seconds)}
    async with client.post(f"{base}/v1/completions", json=row.body, headers=headers) as answer:
        if answer.status != 200:
            raise SystemExit(f"{base} answered {answer.status}")
        if not row.chunks:
            await answer.read()
            return 1000 * (time.perf_counter() - started)
        ages = []
        async for line in answer.content:
            if line.startswith(b"data: "):
                sent = int(line.partition(b'"text":"')[2][:20])
                ages.append((time.monotonic_ns() - sent) / 1e6)
    if len(ages) != row.chunks:
        raise SystemExit(f"{base} sent {len(ages)} of {row.chunks} chunks")
    return statistics.median(ages)


@dataclass(frozen=True)
class Result:
    """In milliseconds; ``added`` has one difference of medians per round, ``cpu`` is the gate's
    own processor time."""

    direct: list[float]
    gated: list[float]
    added: list[float]
    cpu: float


async def compare(
    client: aiohttp.ClientSession, ways: Ways, row: Row, rounds: int, number: int
) -> Result:
    """``concurrency`` workers, each of which takes both ways in turn."""

    async def worker(times: dict[str, list[float]]) -> None:
        for index in range(max(1, number // row.concurrency)):
            order = (ways.direct, ways.gated) if index % 2 == 0 else (ways.gated, ways.direct)
            for base in order:
                times[base].append(await ask(client, base, row))

    result = Result([], [], [], 0.0)
    started = ways.gate_seconds()
    for index in range(rounds + 1):
        times: dict[str, list[float]] = {ways.direct: [], ways.gated: []}
        await asyncio.gather(*(worker(times) for _ in range(row.concurrency)))
        if index == 0:
            # Connections and caches are warm from here on.
            started = ways.gate_seconds()
            continue
        direct, gated = times[ways.direct], times[ways.gated]
        result.direct.extend(direct)
        result.gated.extend(gated)
        result.added.append(statistics.median(gated) - statistics.median(direct))
    units = len(result.gated) * (row.chunks or 1)
    return replace(result, cpu=1000 * (ways.gate_seconds() - started) / units)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def show(row: Row, result: Result) -> bool:
    """Whether the goal was met."""
    added = statistics.median(result.added)
    met = row.goal_ms is None or added <= row.goal_ms
    figures = (
        percentile(result.direct, 0.5),
        percentile(result.direct, 0.99),
        percentile(result.gated, 0.5),
        percentile(result.gated, 0.99),
        added,
        min(result.added),
        max(result.added),
    )
    shown = "{:>9.3f}{:>9.3f}{:>9.3f}{:>9.3f}{:>9.3f} ({:.3f} to {:.3f})".format(*figures)
    told = "" if met else f" above the goal of {row.goal_ms} ms"
    print(f"{row.name:<32}{result.cpu:>8.3f}{shown}{told}", flush=True)
    return met


@contextmanager
def process(command: list[str], healthy: str) -> Iterator[psutil.Process]:
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as child:
        try:
            wait_for(healthy, lambda: child.poll() is None)
            yield psutil.Process(child.pid)
        finally:
            child.terminate()


def wait_for(url: str, lives: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while lives() and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise SystemExit(f"{url} did not answer")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


async def run(ways: Ways, arguments: argparse.Namespace) -> bool:
    met = True
    print(f"{platform.machine()}, Python {platform.python_version()}; milliseconds")
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{os.cpu_count()} cores, load average {load} before the start")
    print(f"{'':<32}{'gate':>8}{'direct':>18}{'by the gate':>18}{'added':>9} (spread)")
    print(f"{'':<32}{'CPU':>8}{'p50':>9}{'p99':>9}{'p50':>9}{'p99':>9}{'p50':>9}")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        for row in rows(arguments.chunks):
            number = arguments.streams if row.chunks else arguments.requests
            result = await compare(client, ways, row, arguments.rounds, number)
            met = show(row, result) and met
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description="What the gate adds to requests and chunks.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200, help="per way and round")
    parser.add_argument("--streams", type=int, default=8, help="per way and round")
    parser.add_argument("--chunks", type=int, default=100, help="of a stream")
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return 0
    upstream_port, gate_port = free_port(), free_port()
    direct, gated = (f"http://127.0.0.1:{port}" for port in (upstream_port, gate_port))
    upstream = [sys.executable, __file__, "--serve", str(upstream_port)]
    gate = [sys.executable, "-m", "plimsoll_engine.gate", "--upstream", direct]
    gate += ["--host", "127.0.0.1", "--port", str(gate_port), "--control-port", "0"]
    gate += ["--max-num-seqs", "64"]
    with (
        process(upstream, f"{direct}/v1/models"),
        process(gate, f"{gated}/v1/models") as running,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):

        def gate_seconds() -> float:
            times = running.cpu_times()
            return float(times.user + times.system)

        return 0 if runner.run(run(Ways(direct, gated, gate_seconds), arguments)) else 1


if __name__ == "__main__":
    sys.exit(main())
