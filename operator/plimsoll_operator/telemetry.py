"""The operator's own metrics.

In: what the edges count (requests, passes, scrapes, decisions). Out: a page in Prometheus' format.
Knows nothing of what the figures mean.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "plimsoll_operator"
# Seconds. A pass with an engine that does not answer takes up to the scrape's timeout of 5 s.
_PASS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(frozen=True)
class Standing:
    """An LLMDeployment after a pass: ``conditions`` as in status; ``failed_at`` when a pod last
    failed, by class, in seconds since the epoch; restarts that the tuner caused in the last 24
    hours, and may cause (None: the spec could not be read)."""

    conditions: tuple[Mapping[str, Any], ...] = ()
    failed_at: Mapping[str, float] = field(default_factory=dict)
    restarts_used: int | None = None
    restarts_allowed: int | None = None


class Telemetry:
    """One per process."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.leader = Gauge(
            f"{PREFIX}_leader", "1 while this operator works, 0 on standby.", registry=registry
        )
        self._passes = Histogram(
            f"{PREFIX}_reconcile_seconds",
            "Duration of the passes, by outcome.",
            ("outcome",),
            buckets=_PASS_BUCKETS,
            registry=registry,
        )
        self.requests = Counter(
            f"{PREFIX}_api_requests",
            "Requests to the API server, by verb and HTTP status (0: no answer).",
            ("verb", "status"),
            registry=registry,
        )
        self._decisions = Counter(
            f"{PREFIX}_decisions",
            "Limits moved, by rule and parameter.",
            ("rule", "parameter"),
            registry=registry,
        )
        self._scraped = Gauge(
            f"{PREFIX}_scrape_timestamp_seconds",
            "When all engines of an LLMDeployment were last read; time() minus it is the age.",
            ("namespace", "name"),
            registry=registry,
        )
        self._standings: dict[tuple[str, str], Standing] = {}
        registry.register(_StandingCollector(self._standings))
        # At 0 from the start, so that a rate over the first error is not lost.
        for outcome in ("done", "error"):
            self._passes.labels(outcome)

    @contextmanager
    def measure_pass(self) -> Iterator[None]:
        begun, outcome = time.perf_counter(), "error"
        try:
            yield
            outcome = "done"
        finally:
            self._passes.labels(outcome).observe(time.perf_counter() - begun)

    def count_request(self, verb: str, status: int) -> None:
        self.requests.labels(verb, str(status)).inc()

    def count_decision(self, rule: str, parameter: str) -> None:
        self._decisions.labels(rule, parameter).inc()

    def note_scrape(self, namespace: str, name: str, at: float) -> None:
        self._scraped.labels(namespace, name).set(at)

    def note_standing(self, namespace: str, name: str, standing: Standing) -> None:
        self._standings[namespace, name] = standing

    def forget(self, namespace: str, name: str) -> None:
        """The LLMDeployment is gone; its series go with it."""
        self._standings.pop((namespace, name), None)
        self._scraped.remove_by_labels({"namespace": namespace, "name": name})

    def page(self) -> bytes:
        return generate_latest(self._registry)


class _StandingCollector(Collector):
    """Read at the moment of the scrape, so that what no longer holds has no series."""

    def __init__(self, standings: Mapping[tuple[str, str], Standing]) -> None:
        self._standings = standings

    def collect(self) -> Iterator[Metric]:
        conditions = _gauge(
            "condition", "1 for each condition as it is now.", "type", "status", "reason"
        )
        failed = _gauge("last_failure_timestamp_seconds", "When a pod last failed.", "class")
        used = _gauge("restarts_used", "Restarts caused by the tuner in the last 24 hours.")
        allowed = _gauge("restarts_allowed", "Restarts that the tuner may cause in 24 hours.")
        for key, standing in self._standings.items():
            for condition in standing.conditions:
                what = (condition["type"], condition["status"], condition["reason"])
                conditions.add_metric((*key, *what), 1)
            for failure_class, at in standing.failed_at.items():
                failed.add_metric((*key, failure_class), at)
            if standing.restarts_used is not None:
                used.add_metric(key, standing.restarts_used)
            if standing.restarts_allowed is not None:
                allowed.add_metric(key, standing.restarts_allowed)
        yield from (conditions, failed, used, allowed)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=("namespace", "name", *labels))
