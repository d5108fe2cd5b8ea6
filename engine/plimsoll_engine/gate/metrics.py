"""The gate's own metrics, appended to the upstream's page.

In: the gate. Out: a page in the Prometheus text format. Names and labels are the engine's where both
have them; what is unknown has no sample.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from plimsoll_engine.gate.gate import Gate

LABELS = ("model_name", "engine")
ENGINE = "0"


def own_page(gate: Gate) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_GateCollector(gate))
    return generate_latest(registry).decode()


class _GateCollector(Collector):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        names = () if gate.state is None else gate.state.model.names
        # An empty label is an absent one.
        self._labels = (names[0] if names else "", ENGINE)

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        gate = self._gate
        ceiling, limits = gate.ceiling, gate.limits
        yield self._gauge("upstream_up", "1 when it answers as vLLM does.", int(bool(gate.state)))
        rejected = CounterMetricFamily(
            "plimsoll:requests_rejected", "Requests refused.", labels=(*LABELS, "reason")
        )
        for reason, count in gate.refused.items():
            rejected.add_metric((*self._labels, reason.value), count)
        yield rejected
        for name, text, value in (
            (
                "max_model_len_admitted",
                "Longest request admitted now.",
                None if ceiling is None else limits.admitted(ceiling),
            ),
            ("max_model_len_ceiling", "Longest request ever admitted here.", ceiling),
            (
                "largest_prompt_admissible_tokens",
                "Longest prompt admitted now.",
                None if ceiling is None else limits.admitted(ceiling) - 1,
            ),
            (
                "long_prompt_tokens",
                "Prompts of more tokens are long.",
                limits.current.long_prompt_tokens,
            ),
            (
                "long_prompt_share",
                "Share of the blocks up to which long prompts are admitted.",
                limits.current.long_prompt_share,
            ),
            (
                "long_queue_share",
                "Share of the blocks that long prompts may come to while they wait.",
                limits.current.long_queue_share,
            ),
            ("limits_revision", "Revision of the limits in force.", limits.revision),
            ("gate_requests_running", "Sequences at the upstream.", gate.running),
            ("gate_requests_waiting", "Sequences waiting in the gate.", gate.waiting),
            ("gate_long_requests_running", "Long requests at the upstream.", gate.long_running),
        ):
            if value is not None:
                yield self._gauge(name, text, value)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"plimsoll:{name}", text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family
