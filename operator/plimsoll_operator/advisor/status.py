"""The status of a MemoryAdvisor.

In: what one pass saw and advised, and the status as last written. Out: the whole next status as a plain
object, and the Events about new advice. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from plimsoll_operator.advisor.advice import Advice, flag_of, standing
from plimsoll_operator.advisor.advise import Advised
from plimsoll_operator.advisor.conditions import judge
from plimsoll_operator.advisor.observed import AdvisedPod, Observed
from plimsoll_operator.advisor.record import write_advice, write_learned, write_traffic
from plimsoll_operator.advisor.settings import Current
from plimsoll_operator.advisor.traffic import find_savings, peak_demand
from plimsoll_operator.desired.status import (
    build_conditions,
    last_failure,
    pruned,
    timestamp,
)
from plimsoll_operator.metrics_page import FLOATS, INTEGERS
from plimsoll_operator.observed import read_status
from plimsoll_operator.tuning.record import record_tuning
from plimsoll_operator.tuning.values import LANE, EngineReading, Event, Rule, Unknown, Verdict
from plimsoll_operator.tuning.values import Status as State

Json = dict[str, Any]

PODS_SHOWN = 100
_FIELDS = {
    "model": "model",
    "max_model_len": "maxModelLen",
    "gpu_memory_utilization": "gpuMemoryUtilization",
    "max_num_seqs": "maxNumSeqs",
    "max_num_batched_tokens": "maxNumBatchedTokens",
    "tensor_parallel_size": "tensorParallelSize",
    "pipeline_parallel_size": "pipelineParallelSize",
    "block_size": "blockSize",
    "kv_cache_memory_bytes": "kvCacheMemoryBytes",
    "cache_tokens": "cacheTokens",
}


def build_status(observed: Observed, advised: Advised, now: float) -> Json:
    """Every part is left out when it is empty or unknown. Without a judgement what was known before
    stands: the advice, the tuner's state, and what was learned."""
    previous, known = read_status(observed.resource), advised.known
    generation = observed.advisor.generation
    tuning: Json = {key: previous[key] for key in ("tuning", "oom") if key in previous}
    if advised.decision is not None:
        tuning = record_tuning(advised.decision)
    newest = observed.newest
    conditions = judge(observed, advised, now)
    return pruned(
        {
            "observedGeneration": generation,
            "conditions": build_conditions(previous, generation, conditions, now),
            "podsFound": len(observed.pods),
            "podsRead": len(observed.readings),
            "podsSummary": f"{len(observed.readings)}/{len(observed.pods)}",
            "pods": [_pod(each, observed, advised) for each in observed.pods[:PODS_SHOWN]],
            "absentMetrics": _absent(observed.readings),
            "current": _current(advised.current),
            "unread": [] if newest is None else list(newest.flags.unread),
            "failures": {"last": last_failure(previous, advised.failures)},
            "recommendation": _recommendation(observed, advised),
            "history": [pruned(write_advice(each)) for each in known.advice],
            "traffic": write_traffic(known.traffic),
            "learned": write_learned(known),
            "load": _load(observed, now),
            **tuning,
        }
    )


def build_invalid_status(resource: Json, message: str, now: float) -> Json:
    """For a spec that cannot be read: what was known before, and the condition that says so."""
    previous, generation = read_status(resource), resource["metadata"]["generation"]
    verdict = Verdict("Ready", State.FALSE, "InvalidSpec", message)
    conditions = build_conditions(previous, generation, (verdict,), now)
    return {**previous, "observedGeneration": generation, "conditions": conditions}


def events_of(advised: Advised) -> tuple[Event, ...]:
    """What the tuner tells (deaths by memory, missing metrics), and new advice. The lane is where it
    would start with any engine, and no news of this one."""
    told = () if advised.decision is None else advised.decision.events
    fresh = (
        Event("ChangeAdvised", f"{flag_of(each)}: {each.reason}")
        for each in advised.fresh
        if each.rule is not Rule.LANE
    )
    return (*told, *fresh)


def _pod(each: AdvisedPod, observed: Observed, advised: Advised) -> Json:
    page = observed.pages.get(each.name)
    if isinstance(page, EngineReading):
        return {"name": each.name, "state": "Read"}
    if isinstance(page, Unknown):
        state = "Unread" if each.name in observed.engines else "Starting"
        return {"name": each.name, "state": state, "message": page.message}
    if each.pod.ready and not each.serves:
        return {"name": each.name, "state": "Worker"}
    told = (failure.message for failure in advised.failures if failure.pod == each.name)
    return {"name": each.name, "state": "NotRunning", "message": next(told, None)}


def _absent(readings: Iterable[EngineReading]) -> list[str]:
    """What stock vLLM usually has on its page and one of these pages has not."""
    wanted = {
        name: field for field, (name, _) in (FLOATS | INTEGERS).items() if name.startswith("vllm:")
    }
    absent = {
        name for page in readings for name, field in wanted.items() if getattr(page, field) is None
    }
    return sorted(absent)


def _current(current: Current) -> Json:
    found = {key: getattr(current, field) for field, key in _FIELDS.items()}
    sources = {_FIELDS[field]: source.value for field, source in current.sources.items()}
    return {**found, "sources": sources}


def _recommendation(observed: Observed, advised: Advised) -> Json:
    found, known = standing(advised.known.advice), advised.known
    ours = [flag_of(each) for each in found if each.parameter in LANE]
    theirs = [flag_of(each) for each in found if each.parameter not in LANE]
    peak = peak_demand(known.learned.peaks)
    return {
        "summary": " ".join(theirs) or ("as it is" if advised.decision is not None else None),
        "limits": {each.parameter.value: each.to for each in found},
        "vllmFlags": theirs,
        "gateFlags": ours,
        "reasons": [_reason(each) for each in found],
        "peakDemandPercent": None if peak is None else round(100 * peak),
        "saves": list(
            find_savings(
                known.traffic,
                known.state.oom,
                known.learned.peaks,
                len(observed.readings),
                observed.readings,
            )
        ),
    }


def _reason(advice: Advice) -> str:
    return f"{flag_of(advice)}: {advice.rule}: {advice.reason}; {advice.expected}"[:1024]


def _load(observed: Observed, now: float) -> Json:
    readings = observed.readings
    if not readings:
        return {}
    running = [reading.running for reading in readings]
    return {
        "kvCacheUsagePercent": round(100 * max(reading.kv_cache_usage for reading in readings)),
        "running": None if None in running else sum(each or 0 for each in running),
        "waiting": sum(reading.waiting for reading in readings),
        "time": timestamp(now),
    }
