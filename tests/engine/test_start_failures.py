"""Every start that fails for a figure tells the figures, and a setting with which it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from plimsoll_engine.config import EngineConfig
from plimsoll_engine.executor import AllocationFailure, MemoryFigures
from plimsoll_engine.memory import MemoryPlan, build_plan
from plimsoll_engine.parallel.shard import check_size
from plimsoll_engine.startup import plan_start
from plimsoll_engine.termination import EngineFailure, FailureClass
from support.scripted_executor import ScriptedExecutor, figures

MIB = 1 << 20
# 450 blocks of 16 tokens at 0.90.
FIGURES = MemoryFigures(
    total=1000 * MIB,
    weights=300 * MIB,
    activations=100 * MIB,
    runtime=50 * MIB,
    bytes_per_block=MIB,
)
Value = str | int | float


def plan(
    length: int | None,
    *,
    figures: MemoryFigures = FIGURES,
    utilization: float = 0.9,
    elsewhere: int = 0,
) -> MemoryPlan:
    at_rest = figures.total - figures.weights - figures.runtime
    return build_plan(
        figures,
        free=max(0, at_rest - elsewhere),
        utilization=utilization,
        block_size=16,
        model_max_len=8192,
        max_model_len=length,
    )


class NarrowDevice(ScriptedExecutor):
    """Its memory holds a step of 1024 tokens."""

    def profile(
        self, *, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
    ) -> MemoryFigures:
        if max_num_batched_tokens > 1024:
            raise AllocationFailure("out of memory", 7 * MIB)
        return super().profile(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )


def start(**settings: int) -> None:
    config = replace(EngineConfig(model="m", max_num_batched_tokens=2048), **settings)  # type: ignore[arg-type]
    plan_start(config, NarrowDevice(memory_figures=figures(256)))


@dataclass(frozen=True)
class Case:
    failure_class: FailureClass
    fail: Callable[[], object]
    flag: str
    # With the value suggested.
    work: Callable[[Value], object]
    # Figures that the message must not do without.
    figures: tuple[str, ...]


CASES = {
    "the length is too long for the pool": Case(
        FailureClass.KV_TOO_SMALL_FOR_MAX_LEN,
        lambda: plan(8192),
        "--max-model-len",
        lambda value: plan(int(value)),
        ("max_model_len_that_fits", "gpu_memory_utilization_needed", "memory_needed_bytes"),
    ),
    "there is no room for any block": Case(
        FailureClass.KV_TOO_SMALL_FOR_MAX_LEN,
        lambda: plan(None, utilization=0.44),
        "--gpu-memory-utilization",
        lambda value: plan(None, utilization=float(value)),
        ("kv_cache_needed_bytes", "gpu_memory_utilization_needed"),
    ),
    "steps leave nothing at any utilization": Case(
        FailureClass.KV_TOO_SMALL_FOR_MAX_LEN,
        lambda: plan(160, figures=replace(FIGURES, activations=645 * MIB)),
        "memory",
        lambda value: plan(160, figures=replace(FIGURES, activations=645 * MIB, total=int(value))),
        ("memory_needed_bytes", "activations_bytes"),
    ),
    "the weights fill the device": Case(
        FailureClass.MODEL_TOO_LARGE,
        lambda: plan(160, figures=replace(FIGURES, total=350 * MIB)),
        "memory",
        lambda value: plan(160, figures=replace(FIGURES, total=int(value))),
        ("weights_bytes", "total_bytes", "memory_needed_bytes"),
    ),
    "others hold memory": Case(
        FailureClass.DEVICE_BUSY_AT_START,
        lambda: plan(7000, elsewhere=200 * MIB),
        "--max-model-len",
        lambda value: plan(int(value), elsewhere=200 * MIB),
        ("held_elsewhere_bytes", "free_bytes", "max_model_len_that_fits"),
    ),
    "the widest step does not fit": Case(
        FailureClass.DEVICE_OOM_AT_START,
        start,
        "--max-num-batched-tokens",
        lambda value: start(max_num_batched_tokens=int(value)),
        ("max_num_batched_tokens", "requested_bytes"),
    ),
    "the model has fewer positions": Case(
        FailureClass.INVALID_CONFIGURATION,
        lambda: start(max_num_batched_tokens=512, max_model_len=9000),
        "--max-model-len",
        lambda value: start(max_num_batched_tokens=512, max_model_len=int(value) // 4),
        ("max_model_len", "model_max_len"),
    ),
    "heads do not divide": Case(
        FailureClass.INVALID_CONFIGURATION,
        lambda: check_size(8, 2, 3),
        "--tensor-parallel-size",
        lambda value: check_size(8, 2, int(value)),
        ("num_attention_heads", "num_kv_heads", "size"),
    ),
}
# These have a cause that no setting cures, or none of the start.
WITHOUT_A_SETTING = {
    FailureClass.MODEL_LOAD_FAILED,
    FailureClass.DEVICE_OOM_AT_RUNTIME,
    FailureClass.DEVICE_FAULT,
    FailureClass.COLLECTIVE_FAILURE,
    FailureClass.ENGINE_DEAD,
}


@pytest.mark.parametrize("name", CASES)
def test_a_failed_start_tells_what_works(name: str) -> None:
    case = CASES[name]
    with pytest.raises(EngineFailure) as failed:
        case.fail()
    failure = failed.value
    assert failure.failure_class is case.failure_class
    assert set(case.figures) <= set(failure.figures)
    assert failure.suggestion is not None
    assert failure.suggestion["flag"] == case.flag
    case.work(failure.suggestion["value"])


def test_every_class_has_a_case_or_no_setting() -> None:
    covered = {case.failure_class for case in CASES.values()}
    assert covered | WITHOUT_A_SETTING == set(FailureClass)
    assert not covered & WITHOUT_A_SETTING
