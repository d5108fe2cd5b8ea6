"""What an upstream tells of itself: its model list and its metrics page -> one value.

In: texts as vLLM answers them, old and new metric names. Out: an UpstreamState in which None means
unknown, never zero. Pure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_CACHE_CONFIG = "vllm:cache_config_info"
_STARTED = "process_start_time_seconds"
_NAMES = (
    *_USAGE,
    _CACHE_CONFIG,
    _STARTED,
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_preemptions_total",
)


class UnreadableAnswer(ValueError):
    """An answer that vLLM would not give; the message says what is wrong with it."""


@dataclass(frozen=True)
class UpstreamModel:
    """``max_model_len`` in tokens."""

    names: tuple[str, ...]
    max_model_len: int


@dataclass(frozen=True)
class UpstreamMetrics:
    """Over all engines of the upstream (data parallel ranks). None: unknown."""

    block_size: int | None = None
    num_blocks: int | None = None
    used_blocks: int | None = None
    gpu_memory_utilization: float | None = None
    running: int | None = None
    waiting: int | None = None
    preemptions: int | None = None
    # Unix seconds.
    started_at: float | None = None

    @property
    def pool_tokens(self) -> int | None:
        if self.block_size is None or self.num_blocks is None:
            return None
        return self.block_size * self.num_blocks


@dataclass(frozen=True)
class UpstreamState:
    model: UpstreamModel
    metrics: UpstreamMetrics
    version: str | None


def read_models(body: bytes) -> UpstreamModel:
    """Raises UnreadableAnswer. Of several models (LoRA adapters) the first with a length counts."""
    try:
        document = json.loads(body)
        entries = document["data"]
        lengths = [entry.get("max_model_len") for entry in entries]
        names = tuple(entry["id"] for entry in entries if isinstance(entry["id"], str))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnreadableAnswer(f"/v1/models is no list of models ({error!r})") from None
    known = [each for each in lengths if type(each) is int and each > 0]
    if not names or not known:
        raise UnreadableAnswer("/v1/models names no model with its max_model_len")
    return UpstreamModel(names, known[0])


def read_metrics(page: str) -> UpstreamMetrics:
    """Raises UnreadableAnswer for a page that is not one; absent metrics are unknown."""
    # The parser is slow, and the page has hundreds of lines.
    wanted = "\n".join(line for line in page.splitlines() if line.startswith(_NAMES))
    try:
        samples = [
            sample
            for family in text_string_to_metric_families(wanted + "\n")
            for sample in family.samples
            if math.isfinite(sample.value)
        ]
    except ValueError as error:
        raise UnreadableAnswer(f"/metrics cannot be read ({error})") from None
    caches = [sample.labels for sample in samples if sample.name == _CACHE_CONFIG]
    blocks = {
        labels.get("engine", "0"): number
        for labels in caches
        if (number := _whole(labels, "num_gpu_blocks")) is not None
    }
    return UpstreamMetrics(
        block_size=next((size for each in caches if (size := _whole(each, "block_size"))), None),
        num_blocks=sum(blocks.values()) if blocks and len(blocks) == len(caches) else None,
        used_blocks=_used(samples, blocks),
        gpu_memory_utilization=_utilization(caches),
        running=_sum(samples, "vllm:num_requests_running"),
        waiting=_sum(samples, "vllm:num_requests_waiting"),
        preemptions=_sum(samples, "vllm:num_preemptions_total"),
        started_at=next((sample.value for sample in samples if sample.name == _STARTED), None),
    )


def _used(samples: Iterable[Sample], blocks: Mapping[str, int]) -> int | None:
    """None unless the usage of every engine is known; the newer name comes first."""
    by_name: dict[str, dict[str, float]] = {name: {} for name in _USAGE}
    for sample in samples:
        if sample.name in by_name:
            by_name[sample.name][sample.labels.get("engine", "0")] = sample.value
    usage = next((each for each in by_name.values() if each), {})
    if not blocks or usage.keys() != blocks.keys():
        return None
    return round(sum(share * blocks[engine] for engine, share in usage.items()))


def _sum(samples: Iterable[Sample], name: str) -> int | None:
    values = [sample.value for sample in samples if sample.name == name]
    return round(sum(values)) if values else None


def _whole(labels: Mapping[str, str], name: str) -> int | None:
    text = labels.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and 0 < len(text) <= 18 else None


def _utilization(caches: Iterable[Mapping[str, str]]) -> float | None:
    for labels in caches:
        try:
            share = float(labels.get("gpu_memory_utilization", ""))
        except ValueError:
            continue
        if 0 < share <= 1:
            return share
    return None
