"""From a bare executor to a planned memory and the limits to start with.

In: the configuration and an executor. Out: a StartPlan, or an EngineFailure that names the figures
and what would work. The pool itself is committed by the engine loop.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from plimsoll_engine.config import EngineConfig
from plimsoll_engine.executor import AllocationFailure, Executor, MemoryFigures, ModelLimits
from plimsoll_engine.limits import (
    LimitBounds,
    Limits,
    LimitsFileError,
    find_violation,
    merge_limits,
    read_limits_file,
)
from plimsoll_engine.memory import MemoryPlan, build_plan, check_length, length_to_profile
from plimsoll_engine.termination import EngineFailure, FailureClass, Phase

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartPlan:
    """``memory`` is the plan at the utilization in force. ``planned_pool``, in tokens, is the
    larger of that pool and the flags' own: it bounds what may ever be accepted."""

    model: ModelLimits
    memory: MemoryPlan
    planned_pool: int
    limits: Limits
    revision: int


def plan_start(config: EngineConfig, executor: Executor) -> StartPlan:
    """Loads the weights, measures, plans. Raises EngineFailure."""
    model = executor.load()
    check_length(model.max_model_len, config.max_model_len)
    figures = _profile(config, executor, model)
    free = executor.memory(reset_low_water=True).free
    revision, left = _read_limits(config)
    utilization = config.gpu_memory_utilization
    if config.max_model_len is not None:
        # A length that fits thanks to what the operator learned is no reason to fail.
        utilization = max(utilization, left.gpu_memory_utilization or 0.0)
    plan = build_plan(
        figures,
        free=free,
        utilization=utilization,
        block_size=config.block_size,
        model_max_len=model.max_model_len,
        max_model_len=config.max_model_len,
    )
    limits = _starting_limits(config, plan, left)
    assert limits.gpu_memory_utilization is not None
    assert limits.max_model_len is not None
    blocks = min(plan.blocks_at(limits.gpu_memory_utilization), plan.room(free))
    in_force = plan.at(limits.gpu_memory_utilization, blocks)
    admitted = Limits(max_model_len=min(limits.max_model_len, in_force.pool_tokens))
    return StartPlan(
        model,
        in_force,
        planned_pool=max(plan.pool_tokens, in_force.pool_tokens),
        limits=merge_limits(limits, admitted),
        revision=revision,
    )


def bounds_of(config: EngineConfig, plan: MemoryPlan) -> LimitBounds:
    return LimitBounds(plan.ceiling, config.max_num_seqs, config.max_num_batched_tokens)


def _profile(config: EngineConfig, executor: Executor, model: ModelLimits) -> MemoryFigures:
    length = length_to_profile(
        model,
        executor.memory(),
        max_model_len=config.max_model_len,
        utilization=config.gpu_memory_utilization,
        block_size=config.block_size,
        ranks=config.tensor_parallel_size,
    )
    try:
        return executor.profile(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=length,
        )
    except AllocationFailure as error:
        # The widest batch is what profiling adds to the weights: halve it.
        tokens = max(1, config.max_num_batched_tokens // 2)
        raise EngineFailure(
            FailureClass.DEVICE_OOM_AT_START,
            Phase.PROFILE,
            f"out of memory in the worst step: {config.max_num_batched_tokens} tokens, "
            f"{config.max_num_seqs} requests, context {length}: {error}. "
            f"Lower --max-num-batched-tokens, for example to {tokens}.",
            figures={
                "max_num_batched_tokens": config.max_num_batched_tokens,
                "max_num_seqs": config.max_num_seqs,
                "context": length,
                "requested_bytes": error.requested_bytes or 0,
            },
            suggestion={"flag": "--max-num-batched-tokens", "value": tokens},
        ) from error


def _read_limits(config: EngineConfig) -> tuple[int, Limits]:
    if config.limits_file is None:
        return 0, Limits()
    try:
        return read_limits_file(config.limits_file) or (0, Limits())
    except LimitsFileError as error:
        # The operator sets the limits again over the control channel; a crash loop helps nobody.
        log.warning("limits file passed over, the flags are in force: %s", error)
        return 0, Limits()


def _starting_limits(config: EngineConfig, plan: MemoryPlan, left: Limits) -> Limits:
    """The flags with what the operator left on top, as far as it is possible here."""
    limits = Limits(
        max_model_len=plan.ceiling,
        gpu_memory_utilization=config.gpu_memory_utilization,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        watermark=config.watermark,
        long_prompt_tokens=config.long_prompt_tokens,
        long_prompt_share=config.long_prompt_share,
        long_queue_share=config.long_queue_share,
    )
    bounds = bounds_of(config, plan)
    for name, value in vars(left).items():
        if value is None:
            continue
        asked = merge_limits(limits, Limits(**{name: value}))
        violation = find_violation(asked, bounds)
        if name == "gpu_memory_utilization" and not violation and not plan.blocks_at(value):
            violation = f"gpu_memory_utilization: {value} leaves no KV cache"
        if violation:
            log.warning("limits file: %s; the flag is in force", violation)
        else:
            limits = asked
    return limits
