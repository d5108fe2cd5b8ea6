"""The page of the project's real engine, read by the operator: no name differs between the two."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import httpx2 as httpx
import pytest

from plimsoll_operator.metrics_page import read_page
from plimsoll_operator.tuning.signals import Signals, judge
from plimsoll_operator.tuning.values import EngineReading
from support.api_server import api_server, repeat

ALERTS = Path(__file__).parents[2] / "charts" / "plimsoll" / "templates" / "monitoring.yaml"


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    with api_server(repeat("ab")) as running:
        running.complete(prompt="four", max_tokens=6)
        yield httpx.get(f"{running.url}/metrics").text


def test_every_field_is_known(page: str) -> None:
    served = re.search(r'model_name="([^"]*)"', page)
    assert served is not None
    found = read_page(page, pod="m-0", model=served[1], at=1.0)
    assert isinstance(found, EngineReading)
    unknown = [f.name for f in fields(found) if getattr(found, f.name) in (None, {})]
    assert unknown == []
    assert set(found.planned_bytes) == {"weights", "activations", "runtime", "kv_cache"}
    assert isinstance(judge((found,)), Signals)
    # The sum of six tokens of output: the counters are the right ones.
    assert found.generation_tokens_total == 6.0


def test_every_metric_of_an_alert_is_on_the_page(page: str) -> None:
    named = set(re.findall(r"\b(?:vllm|plimsoll):\w+", ALERTS.read_text()))
    assert len(named) >= 3
    assert [name for name in named if f"\n{name}{{" not in page] == []
