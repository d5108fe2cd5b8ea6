"""The alerts in a real Prometheus and a real Alertmanager: from a full cache to a page, and back.

Opt-in, about five minutes: ``python bench/alerting.py``. A page with an engine's metrics is served on
the loopback address, Prometheus reads it every second with the chart's rules as they are, and
Alertmanager sends what fires to a webhook here. First the engine is calm, then full with requests
waiting, then calm again. Exits 1 when an alert is missing, comes too early, or does not resolve.

Programs come from PATH or from Debian's packages (plimsoll_local.debian_programs). The page is
made up; the labels are those that the chart's PodMonitor gives.
"""

from __future__ import annotations

import http.server
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from plimsoll_local.debian_programs import ensure_program
from plimsoll_local.go_build import MissingTool

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "charts" / "plimsoll" / "files" / "alerts.yaml"
# The alerts' own `for` is 2 minutes; scrapes, evaluations and notifications take seconds.
FOR_S = 120.0
PATIENCE_S = 60.0
EXPECTED = frozenset({"PlimsollCacheUsageHigh", "PlimsollCachePressure"})
LABELS = {"namespace": "default", "pod": "assistant-0", "plimsoll_dev_deployment": "assistant"}


@dataclass
class Engine:
    """The page of an engine, and the webhook's inbox."""

    usage: float = 0.3
    waiting: int = 0
    inbox: queue.SimpleQueue[tuple[float, str, str]] = field(default_factory=queue.SimpleQueue)

    def page(self) -> str:
        labels = '{model_name="m",engine="0"}'
        return (
            f"vllm:kv_cache_usage_perc{labels} {self.usage}\n"
            f"vllm:gpu_cache_usage_perc{labels} {self.usage}\n"
            f"vllm:num_requests_waiting{labels} {self.waiting}\n"
            # An operator beside it, so that PlimsollOperatorDown has no reason to fire.
            "plimsoll_operator_leader 1\n"
        )


def main() -> int:
    try:
        programs = {name: ensure_program(name) for name in ("prometheus", "alertmanager")}
    except MissingTool as missing:
        print(f"not run: {missing}", file=sys.stderr)
        return 1
    engine = Engine()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port = stack.enter_context(serve(engine))
        prometheus, alertmanager = free_port(), free_port()
        write_configuration(folder, port, alertmanager)
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
        return 0 if tell_the_story(engine, f"http://127.0.0.1:{prometheus}") else 1


def tell_the_story(engine: Engine, prometheus: str) -> bool:
    for label in ("model_name", "model"):
        wait_for_sample(prometheus, f'vllm:kv_cache_usage_perc{{{label}="m"}}')
        print(f"a query by {label} finds the usage", flush=True)
    engine.usage, engine.waiting, full_at = 0.99, 3, time.monotonic()
    print("the cache is full and three requests wait", flush=True)
    fired = collect(engine, "firing", full_at)
    early = {name: at for name, at in fired.items() if at < FOR_S}
    engine.usage, engine.waiting, calm_at = 0.3, 0, time.monotonic()
    print("calm again", flush=True)
    resolved = collect(engine, "resolved", calm_at)
    for name, at in early.items():
        print(f"FAILED: {name} came after {at:.0f} s, before its `for` of {FOR_S:g} s")
    for what, found in (("fired", fired), ("resolved", resolved)):
        if found.keys() != EXPECTED:
            print(f"FAILED: {what} have {sorted(found)}, expected {sorted(EXPECTED)}")
    return not early and fired.keys() == resolved.keys() == EXPECTED


def collect(engine: Engine, status: str, since: float) -> dict[str, float]:
    """Alerts that reached the webhook with ``status``, and after how many seconds."""
    found: dict[str, float] = {}
    deadline = since + FOR_S + PATIENCE_S
    while found.keys() != EXPECTED and (left := deadline - time.monotonic()) > 0:
        try:
            at, name, was = engine.inbox.get(timeout=left)
        except queue.Empty:
            break
        if was == status and name not in found:
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


def write_configuration(folder: Path, port: int, alertmanager: int) -> None:
    target = f"127.0.0.1:{port}"
    prometheus: dict[str, Any] = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "alerting": {
            "alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alertmanager}"]}]}]
        },
        "scrape_configs": [
            {
                "job_name": "engines",
                "static_configs": [{"targets": [target], "labels": LABELS}],
                # As the chart's PodMonitor has it.
                "metric_relabel_configs": [
                    {"source_labels": ["model_name"], "regex": "(.+)", "target_label": "model"}
                ],
            }
        ],
    }
    hook = {"url": f"http://{target}/hook", "send_resolved": True}
    route = {"receiver": "here", "group_by": ["..."], "group_wait": "1s", "group_interval": "1s"}
    receivers = [{"name": "here", "webhook_configs": [hook]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(prometheus))
    (folder / "alertmanager.yaml").write_text(
        yaml.safe_dump({"route": route, "receivers": receivers})
    )


@contextmanager
def serve(engine: Engine) -> Iterator[int]:
    """/metrics and the webhook, on a port of the loopback address."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(engine.page().encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            for alert in body["alerts"]:
                engine.inbox.put((time.monotonic(), alert["labels"]["alertname"], alert["status"]))
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
