"""The alerts in a real Prometheus and a real Alertmanager: from an overloaded engine to a page, and back.

Opt-in, about five minutes: ``PYTHONPATH=tests python bench/alerting.py``. A real engine with a tiny model serves on
the loopback address, Prometheus reads its page every second with the chart's rules as they are, and Alertmanager
sends what fires to a webhook here. First the engine is calm, then clients ask for twice as much as its cache holds
at any moment, then they leave. Exits 1 when an alert is missing, comes too early, or does not resolve.

Programs come from PATH or from Debian's packages (plimsoll_local.debian_programs). The labels are those that the
chart's PodMonitor gives; no operator tunes the engine, its one line is made up.
"""

from __future__ import annotations

import http.server
import json
import math
import os
import queue
import random
import string
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from plimsoll_local.debian_programs import ensure_program
from plimsoll_local.go_build import MissingTool
from support.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "charts" / "plimsoll" / "files" / "alerts.yaml"
# The alerts' own `for` is 2 minutes; scrapes, evaluations and notifications take seconds.
FOR_S = 120.0
PATIENCE_S = 60.0
FULL = 0.95
BLOCK_SIZE = 16
EXPECTED = frozenset({"PlimsollCacheUsageHigh", "PlimsollCachePressure"})
LABELS = {"namespace": "default", "pod": "assistant-0", "plimsoll_dev_deployment": "assistant"}


Inbox = queue.SimpleQueue[tuple[float, str, str]]

PROMPT_TOKENS, OUTPUT_TOKENS = 1200, (50, 400)
# So that no other than the operator's absence is looked for.
OPERATOR_PAGE = "plimsoll_operator_leader 1\n"


def main() -> int:
    try:
        programs = {name: ensure_program(name) for name in ("prometheus", "alertmanager")}
    except MissingTool as missing:
        print(f"not run: {missing}", file=sys.stderr)
        return 1
    inbox: Inbox = queue.SimpleQueue()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hook = stack.enter_context(serve(inbox))
        engine, prometheus, alertmanager = free_port(), free_port(), free_port()
        # Six KiB a token: a cache that a few dozen requests fill.
        model = write_tiny_model(folder / "model", num_layers=8, num_kv_heads=6)
        stack.enter_context(
            process(
                folder / "engine.log",
                *(
                    sys.executable,
                    "-m",
                    "plimsoll_engine",
                    "--model",
                    model,
                    "--served-model-name",
                    "m",
                ),
                *("--device", "cpu", "--device-memory", "1Gi", "--host", "127.0.0.1"),
                *("--port", str(engine), "--control-port", str(free_port())),
            )
        )
        write_configuration(folder, engine, hook, alertmanager)
        stack.enter_context(
            process(
                folder / "alertmanager.log",
                *with_its_templates(programs["alertmanager"]),
                f"--config.file={folder}/alertmanager.yaml",
                *(f"--storage.path={folder}/alerts", "--cluster.listen-address="),
                f"--web.listen-address=127.0.0.1:{alertmanager}",
            )
        )
        stack.enter_context(
            process(
                folder / "prometheus.log",
                *(programs["prometheus"], f"--config.file={folder}/prometheus.yaml"),
                *(f"--storage.tsdb.path={folder}/data", "--log.level=warn"),
                f"--web.listen-address=127.0.0.1:{prometheus}",
            )
        )
        addresses = (f"http://127.0.0.1:{port}" for port in (engine, prometheus))
        return 0 if tell_the_story(inbox, *addresses) else 1


def tell_the_story(inbox: Inbox, engine: str, prometheus: str) -> bool:
    for label in ("model_name", "model"):
        wait_for_sample(prometheus, f'vllm:kv_cache_usage_perc{{{label}="m"}}')
        print(f"a query by {label} finds the usage", flush=True)
    with overload(engine) as clients:
        full_at = wait_until_full(engine)
        print(f"the cache is full, and of {clients} clients the others wait", flush=True)
        fired = collect(inbox, "firing", full_at)
    calm_at = time.monotonic()
    print("the clients have left", flush=True)
    resolved = collect(inbox, "resolved", calm_at)
    early = {name: at for name, at in fired.items() if at < FOR_S}
    for name, at in early.items():
        print(f"FAILED: {name} came after {at:.0f} s, before its `for` of {FOR_S:g} s")
    for what, found in (("fired", fired), ("resolved", resolved)):
        if found.keys() != EXPECTED:
            print(f"FAILED: {what} have {sorted(found)}, expected {sorted(EXPECTED)}")
    return not early and fired.keys() == resolved.keys() == EXPECTED


@contextmanager
def overload(engine: str) -> Iterator[int]:
    """As many clients, each with one request after the other, as fill the cache twice."""
    with urllib.request.urlopen(f"{engine}/metrics", timeout=5) as answer:
        page = read_page(answer.read().decode())
    tokens = page["plimsoll:kv_blocks_usable"] * BLOCK_SIZE
    clients = math.ceil(2 * tokens / (PROMPT_TOKENS + sum(OUTPUT_TOKENS) / 2))
    over = threading.Event()

    def ask(seed: int) -> None:
        chance = random.Random(seed)
        while not over.is_set():
            body = {
                "model": "m",
                # No start that another one shares.
                "prompt": "".join(chance.choices(string.ascii_letters, k=PROMPT_TOKENS)),
                "max_tokens": chance.randint(*OUTPUT_TOKENS),
                "ignore_eos": True,
                "stream": True,
            }
            request = urllib.request.Request(
                f"{engine}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            try:
                with urllib.request.urlopen(request, timeout=600) as answer:
                    # A client that leaves in the middle gives its blocks back.
                    while not over.is_set() and answer.readline():
                        pass
            except urllib.error.HTTPError as refused:
                refused.close()
                over.wait(1)

    threads = [threading.Thread(target=ask, args=(seed,), daemon=True) for seed in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield clients
    finally:
        over.set()


def wait_until_full(engine: str) -> float:
    """When the page first says so. Raises TimeoutError when it does not within PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{engine}/metrics", timeout=30) as answer:
            page = read_page(answer.read().decode())
        if page["vllm:kv_cache_usage_perc"] > FULL and page["vllm:num_requests_waiting"]:
            return time.monotonic()
        time.sleep(0.2)
    raise TimeoutError(f"the cache is not full: {page['vllm:kv_cache_usage_perc']:.2f}")


def read_page(text: str) -> dict[str, float]:
    """Of each name the sum over all its labels."""
    page: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            page[sample.name] += sample.value
    return dict(page)


def collect(inbox: Inbox, status: str, since: float) -> dict[str, float]:
    """Alerts that reached the webhook with ``status``, and after how many seconds."""
    found: dict[str, float] = {}
    deadline = since + FOR_S + PATIENCE_S
    while found.keys() != EXPECTED and (left := deadline - time.monotonic()) > 0:
        try:
            at, name, was = inbox.get(timeout=left)
        except queue.Empty:
            break
        if was == status and name not in found:
            if name in EXPECTED:
                found[name] = at - since
            print(f"{name} {status} after {at - since:.0f} s", flush=True)
    return found


def wait_for_sample(prometheus: str, query: str) -> None:
    """Raises TimeoutError when Prometheus has none within a minute."""
    url = f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if json.load(answer)["data"]["result"]:
                    return
        except OSError:
            pass
        time.sleep(0.5)
    raise TimeoutError(f"Prometheus has no sample of {query}")


def with_its_templates(alertmanager: Path) -> tuple[str | Path, ...]:
    """Debian's looks for its default template below /usr/share. Where it was not installed but
    unpacked, it gets a view of its own in which the package's files lie there."""
    shared = Path("usr/share/prometheus/alertmanager/default.tmpl")
    unpacked = alertmanager.parents[2]
    if (Path("/") / shared).exists() or not (unpacked / shared).exists():
        return (alertmanager,)
    view = f"lowerdir={unpacked}/usr/share:/usr/share"
    script = 'mount -t overlay overlay -o "$1" /usr/share && shift && exec "$@"'
    return ("unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", view, alertmanager)


def write_configuration(folder: Path, engine: int, hook: int, alertmanager: int) -> None:
    target = f"127.0.0.1:{hook}"
    prometheus: dict[str, Any] = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "alerting": {
            "alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alertmanager}"]}]}]
        },
        "scrape_configs": [
            {
                "job_name": "engines",
                "static_configs": [{"targets": [f"127.0.0.1:{engine}"], "labels": LABELS}],
                # As the chart's PodMonitor has it.
                "metric_relabel_configs": [
                    {"source_labels": ["model_name"], "regex": "(.+)", "target_label": "model"}
                ],
            },
            {"job_name": "operator", "static_configs": [{"targets": [target]}]},
        ],
    }
    webhook = {"url": f"http://{target}/hook", "send_resolved": True}
    route = {"receiver": "here", "group_by": ["..."], "group_wait": "1s", "group_interval": "1s"}
    receivers = [{"name": "here", "webhook_configs": [webhook]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(prometheus))
    (folder / "alertmanager.yaml").write_text(
        yaml.safe_dump({"route": route, "receivers": receivers})
    )


@contextmanager
def serve(inbox: Inbox) -> Iterator[int]:
    """An operator's /metrics and the webhook, on a port of the loopback address."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(OPERATOR_PAGE.encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            for alert in body["alerts"]:
                inbox.put((time.monotonic(), alert["labels"]["alertname"], alert["status"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def process(log: Path, *command: str | Path) -> Iterator[None]:
    with log.open("w") as file:
        running = subprocess.Popen(
            [os.fspath(part) for part in command], stdout=file, stderr=subprocess.STDOUT
        )
        try:
            yield
        finally:
            if running.poll() is not None:
                print(f"FAILED: {log.stem} ended by itself: {log.read_text()[-1000:]}")
            running.terminate()
            running.wait(20)


def free_port() -> int:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as probe:
        return probe.server_port


if __name__ == "__main__":
    sys.exit(main())
