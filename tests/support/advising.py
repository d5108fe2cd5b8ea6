"""An advisor, its target's pods and their vLLM pages, as values for the pure parts."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from plimsoll_operator.advisor.advise import Advised, Known, advise
from plimsoll_operator.advisor.observe import read_advised
from plimsoll_operator.advisor.observed import Observed
from plimsoll_operator.advisor.record import read_known
from plimsoll_operator.advisor.spec import Advisor
from plimsoll_operator.advisor.status import build_status
from plimsoll_operator.checks import Violation
from plimsoll_operator.metrics_page import read_page
from plimsoll_operator.observed import read_status
from plimsoll_operator.tuning.values import EngineReading, Unknown
from support.resources import NOW, time

Json = dict[str, Any]

ARGS = (
    "--model=org/m",
    "--max-model-len=32768",
    "--gpu-memory-utilization=0.92",
    "--max-num-seqs=256",
)


def advisor_body(kind: str = "Deployment", generation: int = 1, **spec: Any) -> Json:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "MemoryAdvisor",
        "metadata": {
            "name": "advisor",
            "namespace": "default",
            "uid": "uid-advisor",
            "generation": generation,
            "creationTimestamp": time(NOW - 3600),
        },
        "spec": {"targetRef": {"kind": kind, "name": "vllm"}, **copy.deepcopy(spec)},
    }


def pod_body(
    name: str = "vllm-5d8f-abcde",
    *,
    args: Iterable[str] = ARGS,
    ready: bool = True,
    last_terminated: Json | None = None,
    restarts: int = 0,
    created: float = NOW - 3600,
    limits: Json | None = None,
    **container: Any,
) -> Json:
    """A pod of Deployment ``vllm`` with a GPU."""
    limits = {"nvidia.com/gpu": "1", "memory": "64Gi"} if limits is None else limits
    state = {
        "name": "server",
        "image": "vllm/vllm-openai:v0.19.0",
        "ready": ready,
        "started": True,
        "restartCount": restarts,
        "state": {"running": {"startedAt": time(created)}},
    }
    if last_terminated is not None:
        state["lastState"] = {"terminated": last_terminated}
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "labels": {"app": "vllm", "pod-template-hash": "5d8f"},
            "creationTimestamp": time(created),
            "ownerReferences": [
                {"kind": "ReplicaSet", "name": "vllm-5d8f", "uid": "uid-rs", "controller": True}
            ],
        },
        "spec": {
            "nodeName": "node-1",
            "containers": [
                {
                    "name": "server",
                    "image": "vllm/vllm-openai:v0.19.0",
                    "args": list(args),
                    "resources": {"limits": limits},
                    **container,
                }
            ],
        },
        "status": {
            "phase": "Running",
            "podIP": "10.244.0.7",
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True" if ready else "False",
                    "lastTransitionTime": time(created + 60),
                }
            ],
            "containerStatuses": [state],
        },
    }


def vllm_page(
    *,
    usage: float = 0.1,
    waiting: int = 0,
    running: int = 1,
    preemptions: float = 0.0,
    steps: float = 0.0,
    ended: int = 0,
    config: str = 'block_size="16",num_gpu_blocks="2588",gpu_memory_utilization="0.92"',
) -> str:
    """What stock vLLM 0.19 shows, as far as it is read; ``ended`` requests of 1,000 + 200 tokens."""
    labels = 'engine="0",model_name="org/m"'
    return f"""\
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{{labels}}} {usage}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{{labels}}} {waiting}
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{{labels}}} {running}
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{{{labels}}} {preemptions}
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_count{{{labels}}} {steps}
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{{labels}}} {1000 * ended}
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{{labels}}} {200 * ended}
# TYPE vllm:request_prompt_tokens histogram
vllm:request_prompt_tokens_bucket{{le="500.0",{labels}}} 0
vllm:request_prompt_tokens_bucket{{le="1000.0",{labels}}} {ended}
vllm:request_prompt_tokens_bucket{{le="+Inf",{labels}}} {ended}
# TYPE vllm:request_generation_tokens histogram
vllm:request_generation_tokens_bucket{{le="100.0",{labels}}} 0
vllm:request_generation_tokens_bucket{{le="200.0",{labels}}} {ended}
vllm:request_generation_tokens_bucket{{le="+Inf",{labels}}} {ended}
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{engine="0",{config}}} 1
# TYPE process_start_time_seconds gauge
process_start_time_seconds {NOW - 3600}
"""


@dataclass
class Scene:
    """Runs pass after pass, 15 s apart. ``status`` is what the last one would have written."""

    resource: Json = field(default_factory=advisor_body)
    pods: list[Json] = field(default_factory=lambda: [pod_body()])
    missing: Violation | None = None
    now: float = NOW
    known: Known | None = None
    passes: int = 0
    advised: Advised | None = None

    @property
    def status(self) -> Json:
        found: Json = self.resource["status"]
        return found

    def see(self, pages: Mapping[str, str | Unknown] | None = None, **page: Any) -> Advised:
        """``pages`` by pod; else the same page for each."""
        self.passes += 1
        page.setdefault("steps", float(self.passes))
        advisor = Advisor.parse(self.resource)
        pods = tuple(read_advised(body, i, advisor) for i, body in enumerate(self.pods))
        texts: Mapping[str, str | Unknown] = (
            {each.name: vllm_page(**page) for each in pods if each.serves}
            if pages is None
            else pages
        )
        read: dict[str, EngineReading | Unknown] = {
            pod: text
            if isinstance(text, Unknown)
            else read_page(text, pod=pod, model=advisor.metrics.model, at=self.now)
            for pod, text in texts.items()
        }
        observed = Observed(advisor, self.resource, self.missing, pods, read)
        known = self.known or read_known(read_status(self.resource), self.now)
        self.advised = advise(observed, known, self.now)
        self.known = self.advised.known
        self.resource["status"] = build_status(observed, self.advised, self.now)
        self.now += advisor.metrics.interval
        return self.advised

    def restart(self) -> None:
        """The operator's memory is lost."""
        self.known = None

    def condition(self, kind: str) -> Json:
        found: Json = next(c for c in self.status["conditions"] if c["type"] == kind)
        return found
