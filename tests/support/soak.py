"""An engine process under everything at once: ``python -m support.soak --minutes 60 --seed 0``.

The real server, core and runner with a tiny float32 model (``faulty_engine``): chat and completions,
streamed or not, choices, stop strings, log-probabilities, echo, shared prefixes and long prompts,
each compared with what its prompt gave alone at the start; clients that leave at any moment; broken
requests between them; limits that move every few seconds over the control channel; allocations that
fail. In: a length and a seed. Out: exit status 0, or 1 with all that went wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from plimsoll_wire import engine_control_pb2 as wire
from plimsoll_wire import engine_control_pb2_grpc as wire_grpc
from support.soak_clients import PROMPTS, Clients
from support.soak_report import MAX_FAULTS, Report
from support.soak_requests import write_soak_model

MAX_MODEL_LEN = 2000
MAX_NUM_SEQS = 24
MAX_NUM_BATCHED_TOKENS = 256
CLIENTS = 24
# A machine that does other work may take long; never is longer.
REQUEST_SECONDS = 600.0
START_SECONDS = 300.0
# What the process may have gained from the end of its warming up to its end.
MAX_GROWTH = 32 << 20
# In so long a time every kind of trouble has come up.
LOADED_SECONDS = 120.0


class Soak:
    def __init__(
        self,
        folder: Path,
        *,
        seconds: float,
        seed: int,
        prompts: int = PROMPTS,
        leak: bool = False,
    ) -> None:
        self._num_prompts = prompts
        self.report = Report(seed)
        self._folder = folder
        self._seconds = seconds
        self._leak = leak
        self._random = random.Random(seed)
        self._faults = folder / "faults"
        self._termination = folder / "termination-log"
        self._revision = 0
        self._over = False

    async def run(self) -> Report:
        model = write_soak_model(self._folder / "model")
        port, control_port = free_port(), free_port()
        process = self._start(model, port, control_port)
        url = f"http://127.0.0.1:{port}"
        limits = httpx.Limits(max_connections=None)
        channel = grpc.insecure_channel(f"127.0.0.1:{control_port}")
        stub: Any = wire_grpc.EngineControlStub
        try:
            async with httpx.AsyncClient(
                base_url=url, timeout=REQUEST_SECONDS, limits=limits
            ) as client:
                self._client, self._control = client, stub(channel)
                await self._wait_until_healthy(process)
                self._clients = Clients(client, self.report, self._random)
                await self._clients.make_references(self._num_prompts)
                await self._load(process)
                if process.poll() is None:
                    await self._finish(process)
                else:
                    self._tell_death(process)
        finally:
            channel.close()
            if process.poll() is None:
                process.kill()
            process.wait()
        return self.report

    def _start(self, model: Path, port: int, control_port: int) -> subprocess.Popen[bytes]:
        flags = {
            "--faults": self._faults,
            "--fault-seed": self.report.seed,
            "--model": model,
            "--served-model-name": "m",
            "--host": "127.0.0.1",
            "--port": port,
            "--control-port": control_port,
            "--device": "cpu",
            "--max-model-len": MAX_MODEL_LEN,
            "--max-num-seqs": MAX_NUM_SEQS,
            "--max-num-batched-tokens": MAX_NUM_BATCHED_TOKENS,
            "--max-num-queued-reqs": 32,
            "--long-prompt-tokens": 600,
            "--long-prompt-share": 0.5,
        }
        command = [sys.executable, "-m", "support.faulty_engine"]
        command += [str(part) for pair in flags.items() for part in pair]
        return subprocess.Popen(
            [*command, *(["--leak"] if self._leak else [])],
            env={
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parents[1]),
                "TERMINATION_LOG_PATH": str(self._termination),
            },
        )

    async def _wait_until_healthy(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            try:
                if (await self._client.get("/health")).status_code == 200:
                    return
            except httpx.ConnectError:
                await asyncio.sleep(0.1)
        raise RuntimeError(f"the engine did not start (status {process.poll()})")

    async def _load(self, process: subprocess.Popen[bytes]) -> None:
        self._faults.touch()
        begun = time.monotonic()
        others = [
            asyncio.create_task(self._move_limits()),
            asyncio.create_task(self._watch(process, begun)),
            asyncio.create_task(self._clients.send_broken()),
        ]
        clients = [asyncio.create_task(self._clients.be_client()) for _ in range(CLIENTS)]
        deadline = begun + self._seconds
        while time.monotonic() < deadline and process.poll() is None:
            # None of them ends before it is told to.
            if any(task.done() for task in (*clients, *others)):
                break
            await asyncio.sleep(0.2)
        self._over = self._clients.over = True
        for task in (*clients, *others):
            try:
                await asyncio.wait_for(task, REQUEST_SECONDS)
            except (httpx.TransportError, grpc.RpcError) as error:
                if process.poll() is None:
                    self.report.fault(f"{type(error).__name__}: {error}")
            except TimeoutError:
                self.report.fault("a client never came to its end")
        self._faults.unlink()
        self.report.seconds = round(time.monotonic() - begun, 1)

    async def _move_limits(self) -> None:
        chance = self._random
        while not self._over:
            await self._set_limits(
                # Some of them are more than the pool would hold, and rejected.
                max_model_len=chance.choice([chance.randint(64, 600), 1200, MAX_MODEL_LEN]),
                gpu_memory_utilization=chance.uniform(0.6, 0.95),
                max_num_seqs=chance.randint(1, MAX_NUM_SEQS),
                max_num_batched_tokens=chance.randint(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS),
                watermark=chance.choice([0.0, 0.02, 0.1]),
                long_prompt_tokens=chance.randint(100, 1000),
                long_prompt_share=chance.uniform(0.1, 1.0),
            )
            await asyncio.sleep(min(chance.uniform(0.5, 5.0), self._seconds / 8))

    async def _set_limits(self, **limits: Any) -> None:
        self._revision += 1
        request = wire.SetLimitsRequest(revision=self._revision, limits=wire.Limits(**limits))
        response = await asyncio.to_thread(
            self._control.SetLimits, request, timeout=REQUEST_SECONDS
        )
        self.report.limits[wire.LimitsOutcome.Name(response.outcome)] += 1

    async def _watch(self, process: subprocess.Popen[bytes], begun: float) -> None:
        """Health, the page's figures and the memory of the process, every second."""
        resident = psutil.Process(process.pid).memory_info
        told = begun
        while not self._over:
            status = (await self._client.get("/health")).status_code
            if status != 200:
                self.report.fault(f"/health is {status}")
            page = await self._read_page()
            if not 0 <= page["vllm:kv_cache_usage_perc"] <= 1:
                self.report.fault(f"usage {page['vllm:kv_cache_usage_perc']}")
            self._note(page)
            self.report.resident.append(resident().rss)
            if (now := time.monotonic()) - told >= 30:
                told = now
                print(self._progress(now - begun, page), flush=True)
            await asyncio.sleep(1)

    async def _read_page(self) -> dict[str, float]:
        """Of each name the sum over all its labels."""
        page: Counter[str] = Counter()
        text = (await self._client.get("/metrics")).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                page[sample.name] += sample.value  # type: ignore[assignment]
        return dict(page)

    def _note(self, page: dict[str, float]) -> None:
        report = self.report
        report.steps = page["vllm:iteration_tokens_total_count"]
        report.preemptions = page["vllm:num_preemptions_total"]
        report.allocation_failures_caught = page["plimsoll:allocation_failures_caught_total"]
        report.prefix_cache_hits = page["vllm:prefix_cache_hits_total"]

    def _progress(self, seconds: float, page: dict[str, float]) -> str:
        report = self.report
        return (
            f"{seconds / 60:5.1f} of {self._seconds / 60:g} min, seed {report.seed}: "
            f"{report.answered['text'] + report.answered['chat']} answers compared, "
            f"{report.cancelled.total()} cancelled, {report.statuses[429]} refused, "
            f"{report.limits.total()} limits sent, {report.steps:.0f} steps, "
            f"{report.preemptions:.0f} preemptions, {report.allocation_failures_caught:.0f} failed "
            f"allocations caught, {report.resident[-1] >> 20} MiB, {len(report.faults)} faults"
        )

    async def _finish(self, process: subprocess.Popen[bytes]) -> None:
        """It must be empty, say what it said, and leave with 0."""
        report = self.report
        await self._set_limits(
            max_model_len=MAX_MODEL_LEN,
            gpu_memory_utilization=0.9,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            long_prompt_share=1.0,
        )
        # Clients that left are gone from the engine at the end of a step.
        for _ in range(100):
            page = await self._read_page()
            if not page["vllm:num_requests_running"] + page["vllm:num_requests_waiting"]:
                break
            await asyncio.sleep(0.1)
        self._check_empty(page)
        await self._clients.ask_again()
        page = await self._read_page()
        self._check_empty(page)
        self._note(page)
        if (growth := report.growth()) > MAX_GROWTH:
            report.fault(f"the process has grown by {growth >> 20} MiB; allowed {MAX_GROWTH >> 20}")
        for name in ("allocation_failures_caught", "preemptions", "prefix_cache_hits"):
            if self._seconds >= LOADED_SECONDS and not getattr(report, name):
                report.fault(f"the load was none: {name} is 0")
        process.send_signal(signal.SIGTERM)
        status = await asyncio.to_thread(process.wait, 60)
        if status != 0:
            report.fault(f"it left with status {status} after SIGTERM")

    def _check_empty(self, page: dict[str, float]) -> None:
        for name in (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "plimsoll:kv_slots_unused",
        ):
            if page[name]:
                self.report.fault(f"left behind: {name} is {page[name]} with nothing to do")

    def _tell_death(self, process: subprocess.Popen[bytes]) -> None:
        told = self._termination.read_text() if self._termination.exists() else "nothing"
        # There is room for the cause, however many faults have followed from it.
        del self.report.faults[MAX_FAULTS - 1 :]
        self.report.fault(f"the engine has died with status {process.poll()}: {told}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--leak", action="store_true", help="lose a block now and then: must fail")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), seconds=60 * given.minutes, seed=given.seed, leak=given.leak)
        report = asyncio.run(soak.run())
    print(json.dumps(report.summary(), indent=2))
    print("FAILED" if report.faults else "held")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
