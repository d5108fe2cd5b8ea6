"""The operator's own metrics.

In: what the edges count (requests, passes, scrapes, decisions). Out: a page in Prometheus' format.
Knows nothing of what the figures mean.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

PREFIX = "plimsoll_operator"
# Seconds. A pass with an engine that does not answer takes up to the scrape's timeout of 5 s.
_PASS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


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
        self._requests = Counter(
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
        self._requests.labels(verb, str(status)).inc()

    def count_decision(self, rule: str, parameter: str) -> None:
        self._decisions.labels(rule, parameter).inc()

    def note_scrape(self, namespace: str, name: str, at: float) -> None:
        self._scraped.labels(namespace, name).set(at)

    def forget(self, namespace: str, name: str) -> None:
        """The LLMDeployment is gone; its series go with it."""
        self._scraped.remove_by_labels({"namespace": namespace, "name": name})

    def page(self) -> bytes:
        return generate_latest(self._registry)
