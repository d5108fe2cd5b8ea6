"""The chart over many values: it is clean, valid for several Kubernetes releases, and its test and
notes say what is the case."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from plimsoll_local.binaries import ensure_binaries
from support.helm import CHART, PROMETHEUS, Helm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

Json = dict[str, Any]
# The oldest that Chart.yaml allows, one between, and the newest with schemas here.
RELEASES = ("1.31", "1.34", "1.37")
# Kinds of the Prometheus operator have no schemas there.
FOREIGN = {"PodMonitor", "PrometheusRule"}

MATRIX: dict[str, Json] = {
    "the defaults": {},
    "two in listed namespaces": {"replicas": 2, "watchNamespaces": ["a", "b"]},
    "nothing but the Deployment": {
        "crds": {"install": False},
        "serviceAccount": {"create": False, "name": "there"},
        "rbac": {"create": False},
        "networkPolicy": {"enabled": False},
        "monitoring": {"enabled": False},
    },
    "a private registry": {
        "image": {"repository": "r.example/o", "tag": "t", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "a"}, {"name": "b"}],
        "engine": {"image": {"repository": "r.example/e", "tag": "t"}},
    },
    "everything about pods": {
        "podLabels": {"team": "llm"},
        "podAnnotations": {"note": 'yes: "quoted"'},
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "k", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "weight": 1,
                        "podAffinityTerm": {
                            "topologyKey": "kubernetes.io/hostname",
                            "labelSelector": {"matchLabels": {"a": "b"}},
                        },
                    }
                ]
            }
        },
        "priorityClassName": "high",
        "resources": {"requests": {"cpu": "1"}, "limits": None},
        "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:x"}},
        "verbose": True,
    },
    "names of 60 letters": {"fullnameOverride": "a" * 53, "nameOverride": "b" * 53},
    "monitored": {
        "monitoring": {
            "enabled": True,
            "labels": {"release": "prom"},
            "scrapeInterval": "1m30s",
            "alerts": {"cacheUsage": 1, "for": "30s", "runbookBase": "https://e.org/"},
            "dashboards": {
                "labels": {"d": "1"},
                "annotations": {"grafana_folder": "LLM"},
            },
        }
    },
    "a dashboard alone": {"monitoring": {"enabled": False, "dashboards": {"enabled": True}}},
    "asleep": {"replicas": 0},
}

# Most objects are the same in most rows.
_VALID: set[str] = set()


@pytest.fixture
def helm(tmp_path: Path) -> Helm:
    return Helm(ensure_binaries(), tmp_path)


@pytest.mark.parametrize("values", MATRIX.values(), ids=list(MATRIX))
def test_what_is_rendered_is_valid_in_every_release(
    helm: Helm, tmp_path: Path, values: Json
) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    helm("lint", str(CHART), "--strict", "--values", str(file))
    # The definitions are long and the same in every row.
    few = ("--set", "crds.install=false") if values else ()
    bodies = helm.render("--values", str(file), *few)
    named = [(body["kind"], body["metadata"]["name"]) for body in bodies]
    assert len(set(named)) == len(named) or "watchNamespaces" in values
    assert "Deployment" in {body["kind"] for body in bodies}
    for body in bodies:
        text = json.dumps(body)
        if body["kind"] in FOREIGN or text in _VALID:
            continue
        for release in RELEASES:
            kubernetes_validate.validate(body, release, strict=True)
        _VALID.add(text)


def test_every_value_has_a_place_in_the_schema_and_the_other_way_round() -> None:
    """Comments and README: tools/generate.py refuses a value without."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(field: Json, value: Json, path: str) -> None:
        assert field["additionalProperties"] is False, path
        # What Helm itself adds, and what a pod may have too.
        known = field["properties"].keys() - {"global", "claims"}
        assert known == value.keys(), path
        for name, inner in field["properties"].items():
            if "properties" in inner:
                compare(inner, value[name], f"{path}.{name}")

    compare(schema, values, "")


class TestHelmTest:
    @pytest.fixture
    def pod(self, helm: Helm) -> Json:
        (pod,) = (body for body in helm.render() if body["kind"] == "Pod")
        return pod

    @pytest.fixture
    def operator(self) -> Iterator[tuple[str, dict[str, str]]]:
        """An address, and the pages that answer there; whatever else is asked for is 404."""
        pages: dict[str, str] = {}

        class Answer(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = pages.get(self.path)
                self.send_response(200 if page is not None else 404)
                self.end_headers()
                self.wfile.write((page or "").encode())

            def log_message(self, *_: object) -> None:
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.02,))
            thread.start()
            yield f"http://127.0.0.1:{server.server_port}", pages
            server.shutdown()
            thread.join()

    def run(self, pod: Json, address: str) -> subprocess.CompletedProcess[str]:
        (container,) = pod["spec"]["containers"]
        _, *command = container["command"]
        return subprocess.run(
            [sys.executable, *command],
            env={**os.environ, "OPERATOR": address},
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )

    def test_the_operator_that_answers_passes(
        self, pod: Json, operator: tuple[str, dict[str, str]]
    ) -> None:
        address, pages = operator
        pages |= {"/readyz": "standby: a leads\n", "/metrics": "plimsoll_operator_leader 0.0\n"}
        done = self.run(pod, address)
        assert (done.returncode, done.stdout) == (0, "/readyz: standby: a leads\n"), done.stderr

    def test_something_else_at_its_address_fails(
        self, pod: Json, operator: tuple[str, dict[str, str]]
    ) -> None:
        address, pages = operator
        pages |= {"/readyz": "fine", "/metrics": "up 1\n"}
        done = self.run(pod, address)
        assert done.returncode == 1
        assert "is this Plimsoll's operator?" in done.stderr

    def test_it_asks_the_operators_service_and_is_none_of_its_pods(
        self, helm: Helm, pod: Json
    ) -> None:
        (service,) = (body for body in helm.render() if body["kind"] == "Service")
        (container,) = pod["spec"]["containers"]
        (variable,) = container["env"]
        name = service["metadata"]["name"]
        (port,) = service["spec"]["ports"]
        assert variable["value"] == f"http://{name}.ops.svc:{port['port']}"
        assert not service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"


@pytest.mark.parametrize(
    ("arguments", "said", "not_said"),
    [
        (
            (),
            ["watches all namespaces", "helm test plimsoll -n ops", "no Prometheus operator"],
            ["monitoring.labels is empty"],
        ),
        (
            ("--set", "watchNamespaces={a,b}", "--set", "crds.install=false"),
            [
                "the namespaces a, b for",
                "kubectl apply -n a -f manifests/",
                "must be there already",
            ],
            ["all namespaces"],
        ),
        (
            ("--set", "monitoring.enabled=true", "--set", "replicas=0"),
            ["monitoring.labels is empty", "replicas is 0"],
            ["no Prometheus operator"],
        ),
    ],
)
def test_the_notes_tell_the_next_command(
    helm: Helm, arguments: tuple[str, ...], said: list[str], not_said: list[str]
) -> None:
    text = helm("install", "plimsoll", str(CHART), "-n", "ops", "--dry-run=client", *arguments)
    notes = text.split("\nNOTES:\n", 1)[1]
    for words in said:
        assert words in notes
    for words in not_said:
        assert words not in notes
    for crd in CHART.glob("files/crds/*.yaml"):
        assert crd.stem in notes


def test_alerts_and_monitors_need_their_kinds(helm: Helm) -> None:
    """auto: a cluster without the Prometheus operator refuses these objects."""
    kinds = {body["kind"] for body in helm.render()}
    assert not kinds & FOREIGN
    assert {body["kind"] for body in helm.render(*PROMETHEUS)} >= FOREIGN
