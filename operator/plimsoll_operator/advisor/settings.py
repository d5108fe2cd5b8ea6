"""The settings that an advisor's engines run with, and what the tuner is told of them.

In: a pod's words and its page. Out: :class:`Current`, each value with where it was read, and the
tuner's :class:`Settings`. What neither says stays None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum

from plimsoll_operator.advisor.flags import VllmFlags
from plimsoll_operator.advisor.spec import Advisor
from plimsoll_operator.runtimes import live_limits
from plimsoll_operator.spec import RuntimeName, TuningMode
from plimsoll_operator.tuning.settings import DEFAULT_MIN_UTILIZATION
from plimsoll_operator.tuning.values import EngineReading, Limits, Parameter, Settings

# What Plimsoll's gate before stock vLLM would move while it serves; the rest vLLM reads at its start.
LIVE = live_limits(RuntimeName.VLLM)
# vLLM's on every device but a few; only lengths are rounded by it.
_USUAL_BLOCK = 16


class SettingSource(StrEnum):
    FLAG = "Flag"
    METRICS = "Metrics"


@dataclass(frozen=True)
class Current:
    """Lengths in tokens, shares of the device's memory; ``cache_tokens`` is what one pod's cache
    holds. None: unknown. ``sources`` has the known ones, by field."""

    model: str | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    cache_tokens: int | None = None
    sources: Mapping[str, SettingSource] = field(default_factory=dict)

    def value(self, parameter: Parameter) -> float | None:
        """As far as vLLM has such a setting; it has none for the lane."""
        return {
            Parameter.MAX_MODEL_LEN: self.max_model_len,
            Parameter.GPU_MEMORY_UTILIZATION: self.gpu_memory_utilization,
            Parameter.MAX_NUM_SEQS: self.max_num_seqs,
            Parameter.MAX_NUM_BATCHED_TOKENS: self.max_num_batched_tokens,
        }.get(parameter)


NOTHING = Current()


def find_current(flags: VllmFlags, reading: EngineReading | None) -> Current:
    """A flag is believed first; the page has what holds where none was given."""
    found: dict[str, object] = {}
    sources: dict[str, SettingSource] = {}
    for name in (each.name for each in fields(Current)):
        flag = getattr(flags, name, None)
        if flag is not None:
            found[name], sources[name] = flag, SettingSource.FLAG
    if reading is not None:
        blocks, size = reading.usable_blocks, reading.block_size
        told = {
            "gpu_memory_utilization": reading.gpu_memory_utilization,
            "block_size": size,
            "cache_tokens": blocks * size if blocks and size else None,
        }
        for name, value in told.items():
            if value is not None and name not in found:
                found[name], sources[name] = value, SettingSource.METRICS
    return Current(**found, sources=sources)  # type: ignore[arg-type]


def tuning_settings(
    advisor: Advisor,
    current: Current,
    readings: Iterable[EngineReading],
    *,
    uses_device: bool,
    memory_limit: str | None,
) -> Settings | None:
    """None while the share of memory is unknown: every rule starts from it. The bounds that the spec
    leaves out are those of an LLMDeployment that starts with these settings."""
    start = current.gpu_memory_utilization
    if start is None:
        return None
    lowest, highest = advisor.utilization.min_allowed, advisor.utilization.max_allowed
    length = advisor.length
    # A page shows how many run at once: vLLM admits at least as many, whatever its default is.
    seen = max((reading.running or 0 for reading in readings), default=0)
    return Settings(
        mode=TuningMode.ADVISE,
        start=Limits(max_model_len=current.max_model_len, gpu_memory_utilization=start),
        min_utilization=min(DEFAULT_MIN_UTILIZATION, start) if lowest is None else lowest,
        max_utilization=start if highest is None else highest,
        tunes_length=length is not None and current.max_model_len is not None,
        floor=None if length is None else length.min_allowed,
        ceiling=current.max_model_len,
        block_size=current.block_size or _USUAL_BLOCK,
        on_cpu=not uses_device,
        memory_limit=memory_limit,
        time_to_first_token=advisor.time_to_first_token,
        scrape_interval=advisor.metrics.interval,
        generation=advisor.generation,
        max_num_seqs=current.max_num_seqs or seen or None,
        max_num_batched_tokens=current.max_num_batched_tokens,
        live=LIVE,
    )
