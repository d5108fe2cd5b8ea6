from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll_engine.executor import DeviceMemory, MemoryFigures
from plimsoll_engine.memory import (
    MemoryPlan,
    build_plan,
    check_length,
    format_bytes,
    length_to_profile,
)
from plimsoll_engine.termination import EngineFailure, FailureClass
from support.scripted_executor import TINY_MODEL

MIB = 1 << 20
# 1000 MiB; 450 MiB are not KV; at 0.90 that leaves 450 blocks of 16 tokens.
FIGURES = MemoryFigures(
    total=1000 * MIB,
    weights=300 * MIB,
    activations=100 * MIB,
    runtime=50 * MIB,
    bytes_per_block=MIB,
)
AT_REST = FIGURES.total - FIGURES.weights - FIGURES.runtime


def plan(
    *,
    figures: MemoryFigures = FIGURES,
    free: int = AT_REST,
    utilization: float = 0.90,
    model_max_len: int = 8192,
    max_model_len: int | None = None,
) -> MemoryPlan:
    return build_plan(
        figures,
        free=free,
        utilization=utilization,
        block_size=16,
        model_max_len=model_max_len,
        max_model_len=max_model_len,
    )


def failure(**changes: object) -> EngineFailure:
    with pytest.raises(EngineFailure) as caught:
        plan(**changes)  # type: ignore[arg-type]
    return caught.value


def test_the_classes_add_up_to_the_device() -> None:
    made = plan()
    assert made.num_blocks == 450
    assert made.kv_cache == 450 * MIB
    assert made.margin == 100 * MIB
    assert (
        FIGURES.weights + FIGURES.activations + FIGURES.runtime + made.kv_cache + made.margin
        == FIGURES.total
    )


@pytest.mark.parametrize(
    ("model_max_len", "asked", "ceiling", "why"),
    [
        (4096, None, 4096, "the model is the bound"),
        (8192, None, 449 * 16, "the pool is the bound: one block less than all of it"),
        (8192, 7200, 7200, "asked for, and exactly the pool"),
        (8192, 100, 100, "asked for"),
    ],
)
def test_the_ceiling(model_max_len: int, asked: int | None, ceiling: int, why: str) -> None:
    assert plan(model_max_len=model_max_len, max_model_len=asked).ceiling == ceiling, why


def test_the_pool_is_never_larger_than_what_is_really_free() -> None:
    """A neighbour holds 200 MiB: the pool shrinks by that beyond the margin, the length too."""
    made = plan(free=AT_REST - 200 * MIB)
    assert made.num_blocks == 350
    assert made.ceiling == 349 * 16


def test_a_neighbour_that_gives_memory_back_harms_nothing() -> None:
    """It may do so while the step is profiled: then more is free than was ever counted on."""
    assert plan(free=AT_REST + 200 * MIB) == plan()
    assert plan(free=FIGURES.total) == plan()


def test_a_length_that_does_not_fit_is_refused_with_all_that_would_work() -> None:
    refused = failure(max_model_len=8192)
    assert refused.failure_class is FailureClass.KV_TOO_SMALL_FOR_MAX_LEN
    assert refused.exit_status == 1
    assert refused.suggestion == {"flag": "--max-model-len", "value": 7200}
    assert refused.figures["max_model_len_that_fits"] == 7200
    assert refused.figures["gpu_memory_utilization_needed"] == 0.97
    memory = refused.figures["memory_needed_bytes"]
    for fragment in (
        "To serve at least one request with the model's max seq len (8192)",
        "GiB KV cache is needed, which is larger than the available KV cache memory",
        "the estimated maximum model length is 7200",
        "--gpu-memory-utilization to 0.97",
    ):
        assert fragment in refused.message
    # Each of the ways out is one.
    assert plan(max_model_len=7200).ceiling == 7200
    assert plan(max_model_len=8192, utilization=0.97).ceiling == 8192
    assert isinstance(memory, int)
    larger = MemoryFigures(memory, 300 * MIB, 100 * MIB, 50 * MIB, MIB)
    assert plan(figures=larger, free=memory - 350 * MIB, max_model_len=8192).ceiling == 8192


def test_without_room_for_any_block_the_utilization_is_suggested() -> None:
    refused = failure(max_model_len=160, utilization=0.44)
    assert refused.failure_class is FailureClass.KV_TOO_SMALL_FOR_MAX_LEN
    assert "No available memory for the cache blocks" in refused.message
    assert refused.suggestion == {"flag": "--gpu-memory-utilization", "value": 0.46}
    assert plan(max_model_len=160, utilization=0.46).ceiling == 160


def test_the_automatic_length_needs_two_blocks() -> None:
    refused = failure(utilization=0.451)
    assert refused.failure_class is FailureClass.KV_TOO_SMALL_FOR_MAX_LEN
    assert plan(utilization=0.452).ceiling == 16


def test_weights_that_fill_the_device_are_too_large_and_the_memory_that_would_do_is_named() -> None:
    small = MemoryFigures(350 * MIB, 300 * MIB, 100 * MIB, 50 * MIB, MIB)
    refused = failure(figures=small, free=0, max_model_len=160)
    assert refused.failure_class is FailureClass.MODEL_TOO_LARGE
    assert refused.suggestion is not None
    assert refused.suggestion["flag"] == "memory"
    memory = refused.suggestion["value"]
    assert isinstance(memory, int)
    enough = MemoryFigures(memory, 300 * MIB, 100 * MIB, 50 * MIB, MIB)
    assert plan(figures=enough, free=memory - 350 * MIB, max_model_len=160).ceiling == 160


@pytest.mark.parametrize("noise", [-2, 0, 2])
@pytest.mark.parametrize("total", range(380, 460, 7))
def test_the_suggested_memory_works_though_the_next_start_measures_a_little_more(
    total: int, noise: int
) -> None:
    small = replace(FIGURES, total=total * MIB)
    refused = failure(figures=small, free=max(0, (total - 350) * MIB), max_model_len=2048)
    memory = refused.figures["memory_needed_bytes"]
    assert isinstance(memory, int)
    assert str(format_bytes(memory)) in refused.message
    again = replace(FIGURES, total=memory, activations=(100 + noise) * MIB)
    assert plan(figures=again, free=memory - 350 * MIB, max_model_len=2048).ceiling == 2048


def test_a_busy_device_is_told_from_one_that_is_too_small() -> None:
    refused = failure(max_model_len=7000, free=AT_REST - 200 * MIB)
    assert refused.failure_class is FailureClass.DEVICE_BUSY_AT_START
    assert refused.figures["held_elsewhere_bytes"] == 200 * MIB
    assert "is less than desired GPU memory utilization" in refused.message
    assert refused.suggestion == {"flag": "--max-model-len", "value": 350 * 16}


@pytest.mark.parametrize("utilization", [0.01, 0.29, 0.57, 0.9, 0.93, 0.999, 1.0])
def test_blocks_and_utilization_are_each_others_inverse(utilization: float) -> None:
    made = plan()
    blocks = made.blocks_at(utilization)
    assert blocks >= 0
    least = made.utilization_for(blocks + 1)
    assert made.blocks_at(least) >= blocks + 1
    assert made.blocks_at(least - 0.01) < blocks + 1


def test_graphs_take_from_the_pool_what_they_were_seen_to_take() -> None:
    made = plan(figures=replace(FIGURES, graphs=80 * MIB))
    assert made.num_blocks == plan().num_blocks - 80
    assert "  graphs         80.00 MiB    8.0 %  recorded decode steps" in made.format()
    refused = failure(figures=replace(FIGURES, graphs=650 * MIB))
    assert refused.failure_class is FailureClass.MODEL_TOO_LARGE
    assert "graphs (650.00 MiB)" in str(refused)
    assert refused.figures["graphs_bytes"] == 650 * MIB


def test_room_leaves_the_activations_of_the_worst_step_alone() -> None:
    assert plan().room(free=250 * MIB) == 150
    assert plan().room(free=90 * MIB) == 0


def test_the_table_names_every_class_and_what_it_holds() -> None:
    table = plan().format()
    assert table.splitlines() == [
        "Memory plan at utilization 0.9:",
        "  weights       300.00 MiB   30.0 %",
        "  activations   100.00 MiB   10.0 %  peak of the worst admissible step",
        "  graphs               0 B    0.0 %  recorded decode steps",
        "  runtime        50.00 MiB    5.0 %  interpreter, libraries, buffers",
        "  KV cache      450.00 MiB   45.0 %  450 blocks of 16 tokens = 7200 tokens",
        "  margin        100.00 MiB   10.0 %  left alone",
        "  device       1000.00 MiB  100.0 %",
        "  longest request: 7184 tokens; maximum concurrency for requests of that length: 1.00x",
    ]


def test_a_length_beyond_the_models_positions_is_refused_with_both_numbers() -> None:
    """Case B18, first and third: the model's limit has its rope scaling in it already."""
    with pytest.raises(EngineFailure, match=r"8192.*2048") as caught:
        check_length(2048, 8192)
    assert caught.value.failure_class is FailureClass.INVALID_CONFIGURATION
    assert caught.value.exit_status == 2
    assert caught.value.suggestion == {"flag": "--max-model-len", "value": 2048}
    check_length(2048, 2048)
    check_length(2048, None)


@pytest.mark.parametrize(
    ("free", "asked", "length", "why"),
    [
        (900, 4096, 4096, "asked for"),
        (900, None, 8192, "the model's own"),
        (101, None, 512, "1 MiB may become KV, at 2 KiB per token"),
        (10, None, 16, "nothing is left: one block, so that the plan can say what is missing"),
    ],
)
def test_the_length_to_profile(free: int, asked: int | None, length: int, why: str) -> None:
    device = DeviceMemory(1000 * MIB, free * MIB, free * MIB)
    profiled = length_to_profile(
        TINY_MODEL, device, max_model_len=asked, utilization=0.90, block_size=16, ranks=1
    )
    assert profiled == length, why


def test_more_ranks_than_kv_heads_still_hold_a_head_each() -> None:
    """Case B15: the bytes per token are those of max(1, heads / ranks) heads."""
    device = DeviceMemory(1000 * MIB, 101 * MIB, 101 * MIB)
    lengths = [
        length_to_profile(
            TINY_MODEL, device, max_model_len=None, utilization=0.9, block_size=16, ranks=ranks
        )
        for ranks in (1, 2, 4)
    ]
    assert lengths == [512, 1024, 1024]


@pytest.mark.parametrize(
    ("size", "text"),
    [(12, "12 B"), (1536, "1.50 KiB"), (3 * MIB, "3.00 MiB"), (5 << 30, "5.00 GiB")],
)
def test_sizes_are_readable(size: int, text: str) -> None:
    assert format_bytes(size) == text
