"""Alerts and dashboard: promtool accepts them, every query asks for what is really exported, every
alert was seen to fire and not to fire, and the runbook knows it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from plimsoll_operator.telemetry import Standing, Telemetry
from support.engine_server import api_server
from support.promql import metric_names, run_promtool

Json = dict[str, Any]
ROOT = Path(__file__).parents[2]
FILES = ROOT / "charts" / "plimsoll" / "files"
ALERTS = FILES / "alerts.yaml"
CASES = sorted(Path(__file__).parent.glob("*-alerts.yaml"))
RUNBOOK = ROOT / "docs" / "operations.md"


def read_rules() -> list[Json]:
    return [
        rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    ]


RULES = read_rules()
NAMES = [rule["alert"] for rule in RULES if "alert" in rule]
DASHBOARD: Json = json.loads((FILES / "dashboard.json").read_text())


def walk_queries() -> Iterator[tuple[str, str]]:
    """(where, expression) of panels, annotations and variables, with Grafana's variables filled in."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"]
    for annotation in DASHBOARD["annotations"]["list"]:
        yield f"annotation {annotation['name']}", annotation["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
            assert asked is not None, variable["definition"]
            yield f"variable {variable['name']}", asked[1]


QUERIES = [(where, re.sub(r"\$\w+", "x", query)) for where, query in walk_queries()]


@pytest.fixture(scope="module")
def exported() -> frozenset[str]:
    """Names on the pages of a running engine and of the operator, and what the rules record."""
    telemetry = Telemetry()
    telemetry.count_request("GET", 200)
    telemetry.count_decision("pressure", "maxModelLen")
    telemetry.note_scrape("n", "m", 1.0)
    condition = {"type": "Ready", "status": "True", "reason": "Serving"}
    telemetry.note_standing("n", "m", Standing((condition,), {"CgroupOOM": 1.0}, 0, 4))
    with api_server() as engine:
        pages = [engine.client.get("/metrics").text, telemetry.page().decode()]
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    return frozenset(recorded).union(
        sample.name
        for page in pages
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    )


def test_the_names_of_an_expression() -> None:
    expression = (
        'max by (pod) (a:b_total{c="d{e}"}) * on() group_left (x) rate(f[5m] offset 1m) > 0.95 '
        "and time() - g unless h_sum"
    )
    assert metric_names(expression) == {"a:b_total", "f", "g", "h_sum"}


def test_promtool_accepts_the_rules() -> None:
    assert f"{len(RULES)} rules found" in run_promtool("check", "rules", ALERTS)


@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_every_case_ends_as_told(cases: Path) -> None:
    assert "SUCCESS" in run_promtool("test", "rules", cases)


def test_each_alert_fires_in_a_case_and_is_silent_in_one() -> None:
    seen = {
        (check["alertname"], bool(check["exp_alerts"]))
        for path in CASES
        for case in yaml.safe_load(path.read_text())["tests"]
        for check in case["alert_rule_test"]
    }
    assert seen == {(name, fires) for name in NAMES for fires in (True, False)}


@pytest.mark.parametrize("rule", [r for r in RULES if "alert" in r], ids=lambda r: str(r["alert"]))
def test_an_alert_tells_what_it_is_and_where_its_runbook_is(rule: Json) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert {"summary", "description", "runbook_url"} == rule["annotations"].keys()
    name = rule["alert"]
    assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{name.lower()}"
    section = re.search(
        rf"^### {name}\n(.*?)(?=^##)", RUNBOOK.read_text(), re.MULTILINE | re.DOTALL
    )
    assert section is not None
    for part in ("Means", "Confirm", "Do"):
        assert re.search(rf"^\* \*\*{part}\*\*: \S", section[1], re.MULTILINE), part


def test_the_runbook_has_no_section_of_an_alert_that_is_gone() -> None:
    assert re.findall(r"^### (Plimsoll\w+)$", RUNBOOK.read_text(), re.MULTILINE) == NAMES


def test_promtool_accepts_every_query_of_the_dashboard(tmp_path: Path) -> None:
    rules = [{"record": f"q{n}", "expr": query} for n, (_, query) in enumerate(QUERIES)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(QUERIES)} rules found" in run_promtool("check", "rules", file)


def test_everything_that_is_asked_for_is_exported(exported: frozenset[str]) -> None:
    asked = QUERIES + [(rule.get("alert") or rule["record"], rule["expr"]) for rule in RULES]
    for where, query in asked:
        names = metric_names(query)
        assert names, where
        assert names <= exported, (where, names - exported)


def test_the_dashboard_shows_the_line_the_decisions_and_the_latencies() -> None:
    panels = {panel["title"] for panel in DASHBOARD["panels"]}
    assert panels >= {"Memory line of the fullest pod", "First token", "Between tokens", "Queue"}
    assert [each["name"] for each in DASHBOARD["annotations"]["list"]] == ["Decisions", "Failures"]
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    for panel in DASHBOARD["panels"]:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
