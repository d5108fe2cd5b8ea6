"""A metrics page of one engine pod -> one reading.

In: the text of /metrics and the served model. Out: an :class:`EngineReading`, or Unknown with the
metric that is missing. Old and new names are read, and what only a label of vLLM's has. Only series of the served model enter; of several engines in the pod the
fullest decides about usage, while requests and counters add up. Knows no network and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from plimsoll_operator.tuning.values import EngineReading, LengthCounts, Unknown, UnknownReason

# Newest name first: each stood in the pages of some release.
USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "vllm:gpu_cache_usage_factor")
WAITING = "vllm:num_requests_waiting"
# Those that the gate before stock vLLM holds back.
WAITING_AT_GATE = "plimsoll:gate_requests_waiting"
# Metrics of this project speak of a whole pod: its engine is one, and so is the gate.
OF_POD = "plimsoll:"
OVER_LENGTH = {"reason": "over_admitted_length"}

# Per field: metric and how the engines of one pod combine. Free memory and lengths: the tightest.
Combine = Callable[[Iterable[float]], float]
FLOATS: dict[str, tuple[str, Combine]] = {
    "preemptions_total": ("vllm:num_preemptions_total", sum),
    "steps_total": ("vllm:iteration_tokens_total_count", sum),
    "queue_seconds_total": ("vllm:request_queue_time_seconds_sum", sum),
    "queued_requests_total": ("vllm:request_queue_time_seconds_count", sum),
    "recomputed_tokens_total": ("plimsoll:recomputed_tokens_total", sum),
    "prompt_tokens_total": ("vllm:prompt_tokens_total", sum),
    "generation_tokens_total": ("vllm:generation_tokens_total", sum),
    "allocation_failures_total": ("plimsoll:allocation_failures_caught_total", sum),
    "gpu_memory_utilization": ("plimsoll:gpu_memory_utilization", max),
    "step_heartbeat_age": ("plimsoll:step_heartbeat_age_seconds", max),
}
INTEGERS: dict[str, tuple[str, Combine]] = {
    "running": ("vllm:num_requests_running", sum),
    "device_total_bytes": ("plimsoll:device_memory_total_bytes", min),
    "device_free_bytes": ("plimsoll:device_memory_free_bytes", min),
    "device_free_low_water_bytes": ("plimsoll:device_memory_free_low_water_bytes", min),
    "usable_blocks": ("plimsoll:kv_blocks_usable", min),
    "committed_blocks": ("plimsoll:kv_blocks_committed", min),
    "max_model_len_admitted": ("plimsoll:max_model_len_admitted", min),
    "max_model_len_ceiling": ("plimsoll:max_model_len_ceiling", min),
    "largest_prompt_admissible": ("plimsoll:largest_prompt_admissible_tokens", min),
    "limits_revision": ("plimsoll:limits_revision", min),
}
# Without a model label: they speak of the process or of the cache, not of a model.
START_TIME = "process_start_time_seconds"
CACHE_CONFIG = "vllm:cache_config_info"


class Page:
    """The samples of one page that belong to the served model, by metric name."""

    def __init__(self, text: str, model: str | None) -> None:
        """``model`` None: the one model of the page. Raises ValueError for text that is not a metrics
        page, AmbiguousModel when it is to be chosen among several."""
        samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]
        if model is None:
            model = _only_model(samples)
        self._samples: dict[str, list[Sample]] = {}
        for sample in samples:
            if sample.labels.get("model_name", model) == model:
                self._samples.setdefault(sample.name, []).append(sample)
        self.engines = {
            sample.labels["engine"]
            for name in (*USAGE, WAITING)
            for sample in self._of_model(name)
            if "engine" in sample.labels
        }

    def _of_model(self, name: str) -> list[Sample]:
        return [s for s in self._samples.get(name, ()) if "model_name" in s.labels]

    def values(self, name: str, labels: dict[str, str] | None = None) -> list[float] | None:
        """One value per series. None when the metric is absent, has a value that is no number, or
        lacks one of the pod's engines: part of a pod is not the pod."""
        wanted = (labels or {}).items()
        samples = [s for s in self._of_model(name) if wanted <= s.labels.items()]
        engines = {s.labels["engine"] for s in samples if "engine" in s.labels}
        values = [float(s.value) for s in samples]
        part = engines < self.engines and not name.startswith(OF_POD)
        if not values or part or not all(map(math.isfinite, values)):
            return None
        return values

    def combined(self, name: str, combine: Combine) -> float | None:
        values = self.values(name)
        return None if values is None else combine(values)

    def histogram(self, name: str) -> LengthCounts:
        """Cumulative counts by upper bound, over the pod's engines; empty when the page has none."""
        counts: dict[float, float] = {}
        for sample in self._of_model(f"{name}_bucket"):
            try:
                bound = float(sample.labels.get("le", ""))
            except ValueError:
                return ()
            if math.isnan(bound) or not math.isfinite(sample.value):
                return ()
            counts[bound] = counts.get(bound, 0.0) + sample.value
        return tuple(sorted(counts.items()))

    def by_class(self, name: str) -> dict[str, int]:
        """The worst engine's figure for each class of memory."""
        found: dict[str, int] = {}
        for sample in self._of_model(name):
            if "class" in sample.labels and math.isfinite(sample.value):
                memory_class, value = sample.labels["class"], int(sample.value)
                found[memory_class] = max(found.get(memory_class, 0), value)
        return found

    def started_at(self) -> float | None:
        values = [s.value for s in self._samples.get(START_TIME, ()) if math.isfinite(s.value)]
        return max(values, default=None)

    def block_size(self) -> int | None:
        return next(iter(self._whole_in_config("block_size")), None)

    def configured_blocks(self) -> int | None:
        """Blocks of the smallest cache; None unless every engine tells."""
        found = self._whole_in_config("num_gpu_blocks")
        return min(found) if found and len(found) == self._configs else None

    def configured_utilization(self) -> float | None:
        """vLLM's --gpu-memory-utilization, the largest of the pod's engines."""
        try:
            values = [float(text) for text in self._in_config("gpu_memory_utilization")]
        except ValueError:
            return None
        return max((value for value in values if 0 < value <= 1), default=None)

    @property
    def _configs(self) -> int:
        return len(self._samples.get(CACHE_CONFIG, ()))

    def _in_config(self, label: str) -> list[str]:
        """A label of vLLM's settings of the cache, one per engine that has it."""
        samples = self._samples.get(CACHE_CONFIG, ())
        return [sample.labels[label] for sample in samples if label in sample.labels]

    def _whole_in_config(self, label: str) -> list[int]:
        return [int(text) for text in self._in_config(label) if text.isdecimal() and int(text)]


class AmbiguousModel(Exception):
    """The page has several models."""


def _only_model(samples: Iterable[Sample]) -> str | None:
    """By the metrics that every page must have."""
    found = {
        sample.labels["model_name"]
        for sample in samples
        if sample.name in (*USAGE, WAITING) and "model_name" in sample.labels
    }
    if len(found) > 1:
        raise AmbiguousModel(", ".join(sorted(found)))
    return next(iter(found), None)


def read_page(text: str, *, pod: str, model: str | None, at: float) -> EngineReading | Unknown:
    """Reads a page that was fetched at ``at`` (Unix seconds). ``model`` None: the only one on it."""
    try:
        page = Page(text, model)
    except AmbiguousModel as error:
        message = f"its page has several models ({error}) and none was chosen"
        return Unknown(UnknownReason.METRIC_MISSING, pod, message, USAGE[0])
    except (ValueError, KeyError, IndexError) as error:
        return Unknown(UnknownReason.UNREADABLE, pod, f"its page cannot be read: {error}")

    usages = [usage for name in USAGE if (usage := page.combined(name, max)) is not None]
    if not usages:
        return _missing(pod, model, USAGE[0])
    waiting = page.combined(WAITING, sum)
    if waiting is None:
        return _missing(pod, model, WAITING)

    optional: dict[str, Any] = {
        field: page.combined(name, combine) for field, (name, combine) in FLOATS.items()
    }
    for field, (name, combine) in INTEGERS.items():
        value = page.combined(name, combine)
        optional[field] = None if value is None else int(value)
    # Stock vLLM has these as labels alone.
    if optional["usable_blocks"] is None:
        optional["usable_blocks"] = page.configured_blocks()
    if optional["gpu_memory_utilization"] is None:
        optional["gpu_memory_utilization"] = page.configured_utilization()
    for lane in ("short", "long"):
        waits = page.values("plimsoll:longest_wait_seconds", {"lane": lane})
        optional[f"{lane}_wait"] = None if waits is None else max(waits)
    rejected = page.values("plimsoll:requests_rejected_total", OVER_LENGTH)
    return EngineReading(
        pod=pod,
        at=at,
        kv_cache_usage=max(usages),
        waiting=int(waiting + (page.combined(WAITING_AT_GATE, sum) or 0)),
        started_at=page.started_at(),
        rejected_over_length_total=None if rejected is None else sum(rejected),
        planned_bytes=page.by_class("plimsoll:memory_planned_bytes"),
        actual_bytes=page.by_class("plimsoll:memory_actual_bytes"),
        block_size=page.block_size(),
        prompt_lengths=page.histogram("vllm:request_prompt_tokens"),
        output_lengths=page.histogram("vllm:request_generation_tokens"),
        **optional,
    )


def _missing(pod: str, model: str | None, metric: str) -> Unknown:
    of_model = "" if model is None else f" of model {model}"
    message = f"{metric}{of_model} is not on its page"
    return Unknown(UnknownReason.METRIC_MISSING, pod, message, metric)
