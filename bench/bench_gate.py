"""What the gate adds to a request and to a chunk: the same load on one upstream, with and without it.

Four processes on the loopback address: an upstream that answers at once (this file with
``--serve``), the gate as it is started in a pod, a relay that reads nothing of what it passes on
(``--relay``: the least that any proxy can cost on this machine), and the client, which takes the
three ways in turn from request to request, so that whatever else the machine does falls on all.
Prints the gate's processor time, medians and p99, the differences of the medians and their spread
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
from typing import Any, cast

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
    """Three addresses, and the processor time that the gate has taken, in seconds."""

    direct: str
    relayed: str
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


# The least that any process between the two can cost: bytes are passed on unread.


class Relay(asyncio.Protocol):
    def __init__(self, port: int | None = None, peer: Relay | None = None) -> None:
        self._port = port
        self._peer = peer
        self._early: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are no asyncio.Transport by name.
        self._transport = cast("asyncio.Transport", transport)
        if self._port is not None:
            connecting = asyncio.get_running_loop().create_connection(
                lambda: Relay(peer=self), "127.0.0.1", self._port
            )
            asyncio.ensure_future(connecting).add_done_callback(self._join)

    def _join(self, connected: asyncio.Future[tuple[asyncio.Transport, Relay]]) -> None:
        self._peer = connected.result()[1]
        for data in self._early:
            self._peer.send(data)

    def send(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        if self._peer is None:
            self._early.append(data)
        else:
            self._peer.send(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self._peer is not None and self._peer._transport is not None:
            self._peer._transport.close()


async def relay(port: int, upstream: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Relay(upstream), "127.0.0.1", port)
    await server.serve_forever()


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

    times: dict[str, list[float]]
    added: list[float]
    added_by_relay: list[float]
    cpu: float


async def compare(
    client: aiohttp.ClientSession, ways: Ways, row: Row, rounds: int, number: int
) -> Result:
    """``concurrency`` workers, each of which takes the ways in turn."""

    async def worker(times: dict[str, list[float]]) -> None:
        for index in range(max(1, number // row.concurrency)):
            for base in order[index % 3 :] + order[: index % 3]:
                times[base].append(await ask(client, base, row))

    order = (ways.direct, ways.relayed, ways.gated)
    result = Result({base: [] for base in order}, [], [], 0.0)
    started = ways.gate_seconds()
    for index in range(rounds + 1):
        times: dict[str, list[float]] = {base: [] for base in order}
        await asyncio.gather(*(worker(times) for _ in range(row.concurrency)))
        if index == 0:
            # Connections and caches are warm from here on.
            started = ways.gate_seconds()
            continue
        medians = {base: statistics.median(times[base]) for base in order}
        for base in order:
            result.times[base].extend(times[base])
        result.added.append(medians[ways.gated] - medians[ways.direct])
        result.added_by_relay.append(medians[ways.relayed] - medians[ways.direct])
    units = len(result.times[ways.gated]) * (row.chunks or 1)
    return replace(result, cpu=1000 * (ways.gate_seconds() - started) / units)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def show(row: Row, result: Result) -> bool:
    """Whether the goal was met."""
    added = statistics.median(result.added)
    met = row.goal_ms is None or added <= row.goal_ms
    p50, p99 = 0.5, 0.99
    direct, _, gated = result.times.values()
    figures = (
        result.cpu,
        percentile(direct, p50),
        percentile(direct, p99),
        percentile(gated, p50),
        percentile(gated, p99),
        statistics.median(result.added_by_relay),
        added,
    )
    shown = "".join(f"{each:>9.3f}" for each in figures)
    spread = f" ({min(result.added):.3f} to {max(result.added):.3f})"
    told = "" if met else f" above the goal of {row.goal_ms} ms"
    print(f"{row.name:<31}{shown}{spread}{told}", flush=True)
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
    print(f"{'':<31}{'gate':>9}{'direct':>18}{'by the gate':>18}{'added by':>18}")
    heads = ("CPU", "p50", "p99", "p50", "p99", "a relay", "the gate")
    print(f"{'':<31}" + "".join(f"{each:>9}" for each in heads) + " (spread)")
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
    parser.add_argument("--relay", type=int, nargs=2, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return 0
    if arguments.relay:
        uvloop.run(relay(*arguments.relay))
        return 0
    ports = [free_port() for _ in range(3)]
    upstream_port, relay_port, gate_port = ports
    direct, relayed, gated = (f"http://127.0.0.1:{port}" for port in ports)
    between = [sys.executable, __file__, "--relay", str(relay_port), str(upstream_port)]
    upstream = [sys.executable, __file__, "--serve", str(upstream_port)]
    gate = [sys.executable, "-m", "plimsoll_engine.gate", "--upstream", direct]
    gate += ["--host", "127.0.0.1", "--port", str(gate_port), "--control-port", "0"]
    gate += ["--max-num-seqs", "64"]
    with (
        process(upstream, f"{direct}/v1/models"),
        process(between, f"{relayed}/v1/models"),
        process(gate, f"{gated}/v1/models") as running,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):

        def gate_seconds() -> float:
            times = running.cpu_times()
            return float(times.user + times.system)

        return 0 if runner.run(run(Ways(direct, relayed, gated, gate_seconds), arguments)) else 1


if __name__ == "__main__":
    sys.exit(main())
