"""The pictures of the docs, from one real run: the demo's burst, and the dashboard's panels.

Opt-in, about five minutes on two free cores: ``python bench/pictures.py``. It runs ``plimsoll-local demo``,
leads Prometheus with the chart's rules to the two deployments and the operator while the burst goes on,
then asks it what the dashboard asks and draws the answers. docs/pictures/dashboard.png has the panels
where the dashboard has them, drawn by matplotlib: no Grafana was there. Prints the alerts that fired.
``--answers FILE`` keeps what Prometheus answered, and draws again from it when it is there.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import yaml

from plimsoll_local.cluster import Cluster, ClusterError
from plimsoll_local.debian_programs import ensure_program

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, PercentFormatter
from matplotlib.transforms import Bbox

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
FILES = ROOT / "charts" / "plimsoll" / "files"
PICTURES = ROOT / "docs" / "pictures"
CLUSTER = "pictures"
STEP_S = 2
# Of Grafana's grid: columns and rows, and what one is here in inches.
COLUMN, ROW = 0.72, 0.3
# Series in more colours than that are told apart by nobody.
MOST_SERIES = 8


@dataclass(frozen=True)
class Target:
    """A Service with one pod behind it, and the labels that the chart's PodMonitor gives that pod."""

    namespace: str
    service: str
    port: int
    labels: dict[str, str]
    # Its series name LLMDeployments by namespace and name.
    honor_labels: bool = False


def engine(name: str) -> Target:
    labels = {"namespace": "default", "pod": f"{name}-0", "plimsoll_dev_deployment": name}
    return Target("default", name, 80, labels)


TARGETS = (
    engine("assistant"),
    engine("assistant-pinned"),
    Target(
        "plimsoll-system",
        "plimsoll-operator",
        8080,
        {"namespace": "plimsoll-system", "pod": "plimsoll-operator"},
        honor_labels=True,
    ),
)
BURST = (
    (
        "KV cache in use",
        'plimsoll_pod:kv_cache_usage:max{plimsoll_dev_deployment!=""}',
        PercentFormatter(1.0),
    ),
    (
        "requests that wait",
        'sum by (pod) (vllm:num_requests_waiting{plimsoll_dev_deployment!=""})',
        EngFormatter(),
    ),
    (
        "first token, p95 of the last minute (s)",
        "histogram_quantile(0.95, sum by (le, pod) (rate(vllm:time_to_first_token_seconds_bucket[1m])))",
        EngFormatter(),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=Path, help="keep them here, or draw from them again")
    parser.add_argument("--keep", action="store_true", help=f"leave the cluster {CLUSTER} up")
    options = parser.parse_args()
    dashboard = json.loads((FILES / "dashboard.json").read_text())
    if options.answers is not None and options.answers.exists():
        answers = json.loads(options.answers.read_text())
    else:
        answers = measure(dashboard, keep=options.keep)
        if options.answers is not None:
            options.answers.write_text(json.dumps(answers))
    PICTURES.mkdir(exist_ok=True)
    for name, figure in (
        ("demo.png", draw_burst(answers)),
        ("dashboard.png", draw_dashboard(dashboard, answers)),
    ):
        figure.savefig(PICTURES / name, dpi=80, bbox_inches="tight")
        print(PICTURES / name)
    return 0


def measure(dashboard: Json, *, keep: bool) -> Json:
    """Query -> its series, and under "alerts" those that fired. The demo's exit status is its own."""
    program = ensure_program("prometheus")
    command = [sys.executable, "-m", "plimsoll_local", "demo", "--keep", "--name", CLUSTER]
    begun = time.time()
    with ExitStack() as stack:
        demo = stack.enter_context(subprocess.Popen(command))
        if not keep:
            stack.callback(lambda: Cluster.find(CLUSTER).down())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        over = threading.Event()
        for target in TARGETS:
            file = folder / f"{target.service}.json"
            thread = threading.Thread(target=lead, args=(target, file, over))
            thread.start()
            stack.callback(thread.join)
        stack.callback(over.set)
        prometheus = stack.enter_context(run_prometheus(program, folder))
        stack.callback(prometheus.terminate)
        code = demo.wait()
        address = (folder / "address").read_text()
        window = (begun, time.time())
        answers = {query: ask(address, query, window) for query in queries(dashboard)}
        fired = ask(address, 'ALERTS{alertstate="firing"}', window)
    names = sorted({each["metric"]["alertname"] for each in fired})
    print(f"the demo ended with {code}; alerts that fired: {', '.join(names) or 'none'}")
    return answers


def lead(target: Target, file: Path, over: threading.Event) -> None:
    """Tells Prometheus of the target as soon as it is there, and leads to it until all is over."""
    while not over.wait(1):
        try:
            cluster = Cluster.find(CLUSTER)
            with cluster.proxy(target.namespace, target.service, target.port) as url:
                host = urllib.parse.urlsplit(url).netloc
                draft = file.with_suffix(".draft")
                draft.write_text(json.dumps([{"targets": [host], "labels": target.labels}]))
                draft.rename(file)
                over.wait()
        except (ClusterError, OSError):
            # Not yet.
            continue


def run_prometheus(program: Path, folder: Path) -> subprocess.Popen[bytes]:
    configuration = {
        "global": {"scrape_interval": f"{STEP_S}s", "evaluation_interval": f"{STEP_S}s"},
        "rule_files": [str(FILES / "alerts.yaml")],
        "scrape_configs": [
            {
                "job_name": target.service,
                # As the chart's PodMonitors have it.
                "honor_labels": target.honor_labels,
                "metric_relabel_configs": [
                    {"source_labels": ["model_name"], "regex": "(.+)", "target_label": "model"}
                ],
                "file_sd_configs": [
                    {"files": [f"{folder}/{target.service}.json"], "refresh_interval": "2s"}
                ],
            }
            for target in TARGETS
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
    address = f"127.0.0.1:{free_port()}"
    (folder / "address").write_text(f"http://{address}")
    return subprocess.Popen(
        [
            *(program, f"--config.file={folder}/prometheus.yaml", "--log.level=error"),
            *(f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"),
        ]
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def queries(dashboard: Json) -> list[str]:
    asked = [query for _, query, _ in BURST]
    for panel in dashboard["panels"]:
        asked += [filled(target["expr"]) for target in panel.get("targets", ())]
    return asked


def filled(expression: str) -> str:
    """With Grafana's variables as "All" fills them."""
    return expression.replace("$namespace", ".*").replace("$deployment", ".*")


def ask(address: str, query: str, window: tuple[float, float]) -> list[Json]:
    parameters = {"query": query, "start": window[0], "end": window[1], "step": STEP_S}
    url = f"{address}/api/v1/query_range?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        series: list[Json] = json.load(answer)["data"]["result"]
    return series


def draw_burst(answers: Json) -> Any:
    figure, rows = plt.subplots(len(BURST), 1, figsize=(9, 6), sharex=True, layout="constrained")
    begun = first_moment(answers)
    for axes, (title, query, formatter) in zip(rows, BURST, strict=True):
        for series in sorted(answers[query], key=lambda each: each["metric"]["pod"]):
            pod = series["metric"]["pod"]
            label = "pinned at .98, tuning off" if "pinned" in pod else "tuned"
            draw_line(axes, series, begun, label)
        axes.set_title(title, loc="left", fontsize=10)
        axes.yaxis.set_major_formatter(formatter)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    rows[0].legend(loc="upper left", fontsize=8, frameon=False)
    rows[-1].set_xlabel("minutes since Prometheus first saw an engine")
    figure.suptitle("make demo: one burst, two deployments", x=0.01, ha="left")
    return figure


def draw_dashboard(dashboard: Json, answers: Json) -> Any:
    bottom = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in dashboard["panels"]) + 2
    figure = plt.figure(figsize=(24 * COLUMN, bottom * ROW))
    begun = first_moment(answers)
    figure.text(
        *(0, 1),
        "The dashboard's panels over one run of the demo, drawn by matplotlib from Prometheus' answers "
        "to the dashboard's own queries. Not a screenshot of Grafana.",
        fontsize=11,
        va="top",
    )
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        left, top = place["x"] / 24, 1 - (place["y"] + 2) / bottom
        width, height = place["w"] / 24, place["h"] / bottom
        if panel["type"] == "row":
            figure.text(left, top - height, panel["title"], fontsize=12, weight="bold", va="bottom")
            continue
        axes = figure.add_axes((left + 0.03, top - height + 0.012, width - 0.04, height - 0.022))
        axes.set_title(panel["title"], loc="left", fontsize=9)
        if panel["type"] == "table":
            draw_conditions(axes, answers[filled(panel["targets"][0]["expr"])])
        else:
            draw_panel(axes, panel, answers, begun)
    return figure


def draw_panel(axes: Axes, panel: Json, answers: Json, begun: float) -> None:
    lines = [
        (series, label_of(target["legendFormat"], series["metric"]))
        for target in panel["targets"]
        for series in answers[filled(target["expr"])]
    ]
    for series, label in lines[:MOST_SERIES]:
        draw_line(axes, series, begun, label)
    if not lines:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color="grey")
    else:
        axes.legend(fontsize=6, frameon=False, loc="upper left")
    unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit")
    axes.yaxis.set_major_formatter(
        PercentFormatter(1.0) if unit == "percentunit" else EngFormatter(sep="")
    )
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)


def label_of(legend: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        legend = legend.replace(f"{{{{{name}}}}}", value)
    return legend


def draw_line(axes: Axes, series: Json, begun: float, label: str) -> None:
    minutes = [(float(at) - begun) / 60 for at, _ in series["values"]]
    axes.plot(minutes, [float(value) for _, value in series["values"]], label=label, linewidth=1.2)


def draw_conditions(axes: Axes, answer: list[Json]) -> None:
    """As they were at the end."""
    axes.set_axis_off()
    last = max(float(series["values"][-1][0]) for series in answer)
    rows = sorted(
        [series["metric"][label] for label in ("name", "type", "status", "reason")]
        for series in answer
        if float(series["values"][-1][0]) == last
    )
    table = axes.table(rows, colLabels=["name", "type", "status", "reason"], bbox=Bbox.unit())
    table.auto_set_font_size(False)
    table.set_fontsize(6)


def first_moment(answers: Json) -> float:
    return min(float(each["values"][0][0]) for each in answers[BURST[0][1]])


if __name__ == "__main__":
    sys.exit(main())
