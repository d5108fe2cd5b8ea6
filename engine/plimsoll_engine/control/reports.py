"""The core's values as wire messages, and back. Pure: no channel, no core."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from plimsoll_engine.limits import Limits, LimitsOutcome, LimitsResult
from plimsoll_engine.reports import EngineSnapshot
from plimsoll_wire import engine_control_pb2 as wire

_OUTCOMES = {
    LimitsOutcome.APPLIED: wire.APPLIED,
    LimitsOutcome.DEFERRED: wire.DEFERRED,
    LimitsOutcome.REJECTED: wire.REJECTED,
}


@dataclass(frozen=True)
class EngineIdentity:
    """What never changes while the process lives."""

    version: str
    model: str
    device: str
    tensor_parallel_size: int


def build_memory_report(identity: EngineIdentity, now: EngineSnapshot) -> wire.MemoryReport:
    return wire.MemoryReport(
        engine_version=identity.version,
        model=identity.model,
        device=identity.device,
        dtype=now.model.dtype,
        tensor_parallel_size=identity.tensor_parallel_size,
        started_at=now.started_at,
        device_total_bytes=now.device.total,
        device_free_bytes=now.device.free,
        device_free_low_water_bytes=now.device.free_low_water,
        classes=[
            wire.MemoryClass(
                name=each.name,
                planned_bytes=each.planned_bytes,
                actual_bytes=each.actual_bytes,
            )
            for each in now.classes
        ],
        block_size=now.block_size,
        bytes_per_block=now.bytes_per_block,
        committed_blocks=now.committed_blocks,
        usable_blocks=now.usable_blocks,
        used_blocks=now.used_blocks,
        max_model_len_ceiling=now.ceiling,
        model_max_len=now.model.max_model_len,
        largest_prompt_admissible=now.largest_prompt_admissible,
        limits=limits_to_wire(now.limits),
        limits_revision=now.limits_revision,
        limits_outcome=_OUTCOMES[now.limits_outcome],
        limits_reason=now.limits_reason,
        running=now.running,
        waiting=now.waiting,
        preemptions=now.preemptions,
        allocation_failures_caught=now.allocation_failures_caught,
        step_heartbeat_age_seconds=now.heartbeat_age,
    )


def build_limits_response(result: LimitsResult) -> wire.SetLimitsResponse:
    return wire.SetLimitsResponse(
        outcome=_OUTCOMES[result.outcome],
        reason=result.reason,
        revision=result.revision,
        effective=limits_to_wire(result.effective),
    )


def limits_to_wire(limits: Limits) -> wire.Limits:
    """None stays absent."""
    return wire.Limits(
        max_model_len=limits.max_model_len,
        gpu_memory_utilization=limits.gpu_memory_utilization,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        watermark=limits.watermark,
        long_prompt_tokens=limits.long_prompt_tokens,
        long_prompt_share=limits.long_prompt_share,
        long_queue_share=limits.long_queue_share,
    )


def limits_from_wire(limits: wire.Limits) -> Limits:
    """Absent becomes None: that limit stays as it is."""
    return Limits(
        **{
            field.name: getattr(limits, field.name) if limits.HasField(field.name) else None
            for field in dataclasses.fields(Limits)
        }
    )
