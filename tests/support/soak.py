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
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import load_file, save_file

from plimsoll_wire import engine_control_pb2 as wire
from plimsoll_wire import engine_control_pb2_grpc as wire_grpc
from support.tiny_model import write_tiny_model

MAX_MODEL_LEN = 2000
MAX_NUM_SEQS = 24
MAX_NUM_BATCHED_TOKENS = 256
CLIENTS = 24
PROMPTS = 32
# Two tokens this close may change places with the order of a float32 sum: such prompts are not used.
LEAST_LEAD = 1e-4
# A machine that does other work may take long; never is longer.
REQUEST_SECONDS = 600.0
START_SECONDS = 300.0
# What the process may have gained from the end of its warming up to its end.
MAX_GROWTH = 32 << 20
# In so long a time every kind of trouble has come up.
LOADED_SECONDS = 120.0
MAX_FAULTS = 20
FAULT_LENGTH = 600
LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,0123456789"
# Status, and what is sent to get it.
BROKEN: tuple[tuple[int, str, bytes], ...] = (
    (400, "/v1/completions", b"{"),
    (400, "/v1/completions", b'{"prompt": "a", "max_tokens": -1}'),
    (400, "/v1/completions", b'{"prompt": [999999]}'),
    (400, "/v1/completions", b'{"prompt": ""}'),
    (400, "/v1/chat/completions", b'{"messages": []}'),
    (400, "/v1/chat/completions", b"\xff\xfe"),
    (404, "/v1/completions", b'{"model": "other", "prompt": "a"}'),
    (404, "/v2/nothing", b"{}"),
)


@dataclass(frozen=True)
class Reference:
    """A prompt of one character per token, and the greedy answer to it, likewise."""

    prompt: str
    answer: str
    # The chat message that becomes this prompt, when there is one.
    message: str | None


@dataclass
class Report:
    seed: int
    seconds: float = 0.0
    answered: Counter[str] = field(default_factory=Counter)
    cancelled: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    limits: Counter[str] = field(default_factory=Counter)
    steps: float = 0
    preemptions: float = 0
    allocation_failures_caught: float = 0
    prefix_cache_hits: float = 0
    # Bytes, one a round of the watcher.
    resident: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def fault(self, text: str) -> None:
        # The first ones say it all.
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(text[:FAULT_LENGTH])
            print(f"FAULT: {self.faults[-1]}", flush=True)

    def growth(self) -> int:
        """Bytes gained since a fifth of the time had passed, as medians of tenths."""
        tenth = len(self.resident) // 10
        if not tenth:
            return 0
        early, late = self.resident[2 * tenth : 3 * tenth], self.resident[-tenth:]
        return int(statistics.median(late) - statistics.median(early))

    def summary(self) -> dict[str, Any]:
        mib = [round(each / (1 << 20)) for each in self.resident]
        return {
            **{name: value for name, value in vars(self).items() if name != "resident"},
            "resident_mib": {"least": min(mib, default=0), "most": max(mib, default=0)},
            "growth_mib": round(self.growth() / (1 << 20), 1),
        }


def write_soak_model(folder: Path) -> Path:
    """A tiny model that says characters of ASCII alone, so that a text tells its tokens."""
    write_tiny_model(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    said = {vocabulary[letter] for letter in LETTERS if letter != " "}
    # The embedding is tied: a row of zeros has the logit 0, below the best of the others.
    for token_id in set(range(257)) - said:
        tensors["model.embed_tokens.weight"][token_id] = 0
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


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
        self._references: list[Reference] = []
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
                await self._make_references()
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

    async def _make_references(self) -> None:
        """What each prompt gives alone, with nothing found in the cache. Half of them begin alike,
        some are chats, some are long."""
        chance = self._random
        shared = write_text(chance, 400)
        while len(self._references) < self._num_prompts:
            length = chance.choice([chance.randint(1, 60), chance.randint(60, 600), 1500])
            text = write_text(chance, length)
            if chance.random() < 0.5:
                text = shared[: chance.randint(1, 400)] + text[: 1 + length // 4]
            message = text if chance.random() < 0.4 else None
            prompt = text if message is None else f"user: {message}\nassistant: "
            body = {
                "prompt": prompt,
                "max_tokens": chance.randint(1, 60),
                "logprobs": 2,
                "cache_salt": f"reference {len(self._references)}",
            }
            answer = (await self._post("/v1/completions", body)).json()["choices"][0]
            leads = []
            for alternatives in answer["logprobs"]["top_logprobs"]:
                first, second = sorted(alternatives.values())[-2:][::-1]
                leads.append(first - second)
            if min(leads) > LEAST_LEAD:
                self._references.append(Reference(prompt, answer["text"], message))

    async def _load(self, process: subprocess.Popen[bytes]) -> None:
        self._faults.touch()
        begun = time.monotonic()
        others = [
            asyncio.create_task(self._move_limits()),
            asyncio.create_task(self._watch(process, begun)),
            asyncio.create_task(self._send_broken()),
        ]
        clients = [asyncio.create_task(self._be_client()) for _ in range(CLIENTS)]
        deadline = begun + self._seconds
        while time.monotonic() < deadline and process.poll() is None:
            # None of them ends before it is told to.
            if any(task.done() for task in (*clients, *others)):
                break
            await asyncio.sleep(0.2)
        self._over = True
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

    async def _be_client(self) -> None:
        chance = self._random
        while not self._over:
            reference = chance.choice(self._references)
            body, path, expected = self._compose(reference)
            received: list[str] = []
            request = self._exchange(path, body, expected, received)
            if chance.random() < 0.3:
                # At any moment: before a byte is sent, while it waits, in prefill, in decode.
                patience = chance.choice([0.0, 0.01, 0.1, 1.0, 1.0]) * chance.random()
                try:
                    await asyncio.wait_for(request, patience)
                except TimeoutError:
                    self.report.cancelled["begun" if received else "not begun"] += 1
            else:
                await request

    def _compose(self, reference: Reference) -> tuple[dict[str, Any], str, str]:
        """A request of some kind, its path, and the text that it must give."""
        chance = self._random
        answer = reference.answer
        max_tokens = len(answer)
        body: dict[str, Any] = {"priority": chance.choice([0, 0, 0, 1])}
        if chance.random() < 0.3:
            max_tokens = chance.randint(1, len(answer))
        answer = answer[:max_tokens]
        if chance.random() < 0.2:
            at = chance.randrange(len(answer))
            stop = answer[at : at + chance.randint(1, 4)]
            body["stop"] = [stop, "never said"]
            answer = answer[: answer.index(stop)]
        if chance.random() < 0.2:
            body["n"] = chance.randint(2, 4)
        if chance.random() < 0.5:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        body["max_tokens"] = max_tokens
        if reference.message is not None and chance.random() < 0.7:
            body["messages"] = [{"role": "user", "content": reference.message}]
            if chance.random() < 0.3:
                body |= {"logprobs": True, "top_logprobs": chance.randint(0, 5)}
            return body, "/v1/chat/completions", answer
        body["prompt"] = reference.prompt
        if chance.random() < 0.3:
            body["logprobs"] = chance.randint(0, 5)
        if chance.random() < 0.1 and "n" not in body and len(reference.prompt) < 700:
            body["echo"] = True
            answer = reference.prompt + answer
        return body, "/v1/completions", answer

    async def _exchange(
        self, path: str, body: dict[str, Any], expected: str, received: list[str]
    ) -> None:
        """Sends, reads and judges one request. What has come is in ``received``, too."""
        texts: Counter[int] = Counter()
        answer = dict.fromkeys(range(body.get("n", 1)), "")
        document = {"model": "m", "temperature": 0, "ignore_eos": True} | body
        finished = 0
        async with self._client.stream("POST", path, json=document) as response:
            self.report.statuses[response.status_code] += 1
            if response.status_code != 200:
                await response.aread()
                await self._judge_refusal(response, document)
                return
            if not body.get("stream"):
                await response.aread()
                choices = response.json()["choices"]
                for choice in choices:
                    answer[choice["index"]] = text_of(choice)
                    finished += choice["finish_reason"] in ("stop", "length")
            else:
                ended = False
                async for line in response.aiter_lines():
                    if not line:
                        continue
                    received.append(line)
                    payload = line.removeprefix("data: ")
                    if payload == "[DONE]":
                        ended = True
                        continue
                    event = json.loads(payload)
                    if "error" in event:
                        self.report.fault(f"{describe(document)}: {event}")
                        return
                    for choice in event["choices"]:
                        answer[choice["index"]] += text_of(choice)
                        texts[choice["index"]] += 1
                        finished += choice["finish_reason"] in ("stop", "length")
                    # While it runs it says what it is to say, and nothing else.
                    if not all(expected.startswith(text) for text in answer.values()):
                        break
                if not ended and all(expected.startswith(text) for text in answer.values()):
                    self.report.fault(f"{describe(document)}: the stream has no [DONE]")
                    return
        wrong = [text for text in answer.values() if text != expected]
        if wrong:
            self.report.fault(f"{describe(document)}: {wrong[0]!r}, alone {expected!r}")
        elif finished != len(answer):
            self.report.fault(f"{describe(document)}: {finished} of {len(answer)} choices ended")
        kind = "chat" if "messages" in body else "text"
        traits = [name for name in ("stream", "n", "stop", "logprobs", "echo") if name in body]
        self.report.answered[kind] += 1
        self.report.answered.update(traits)

    async def _judge_refusal(self, response: httpx.Response, document: dict[str, Any]) -> None:
        """Too much at once, or too long for the limits of the moment: both pass, and say so."""
        if response.status_code == 429 and "retry-after" in response.headers:
            # Not quite so long: it is to be a load.
            await asyncio.sleep(0.1)
        else:
            self.report.fault(f"{describe(document)}: {response.status_code} {response.text}")

    async def _send_broken(self) -> None:
        while not self._over:
            status, path, content = self._random.choice(BROKEN)
            response = await self._client.post(path, content=content)
            self.report.statuses[response.status_code] += 1
            if response.status_code != status:
                self.report.fault(f"{content!r}: {response.status_code}, expected {status}")
            await asyncio.sleep(self._random.uniform(0.2, 2))

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
        for reference in self._references:
            body = {"prompt": reference.prompt, "max_tokens": len(reference.answer)}
            answer = (await self._post("/v1/completions", body)).json()["choices"][0]["text"]
            if answer != reference.answer:
                report.fault(f"after all: {answer!r}, at first {reference.answer!r}")
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

    async def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        document = {"model": "m", "temperature": 0, "ignore_eos": True} | body
        response = await self._client.post(path, json=document)
        if response.status_code != 200:
            raise RuntimeError(f"{describe(document)}: {response.status_code} {response.text}")
        return response


def text_of(choice: dict[str, Any]) -> str:
    """Of a choice of either API, whole or streamed."""
    if "text" in choice:
        return str(choice["text"])
    return (choice.get("delta") or choice.get("message") or {}).get("content") or ""


def describe(document: dict[str, Any]) -> str:
    text = json.dumps(document)
    return text if len(text) < 300 else f"{text[:140]} ... {text[-140:]}"


def write_text(chance: random.Random, length: int) -> str:
    return "".join(chance.choices(LETTERS, k=length))


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
