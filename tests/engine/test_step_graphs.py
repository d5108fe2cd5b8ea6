"""Recorded decode steps: which size, what the rows left over may touch, and the same tokens as without.

The recorder here runs the work again on the same tensors, where CUDA would replay a graph.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plimsoll_engine.config import DeviceType, EngineConfig
from plimsoll_engine.executor import SequenceChunk, StepBatch
from plimsoll_engine.model_runner import ModelRunner
from plimsoll_engine.sampling_params import SamplingParams
from plimsoll_engine.step_graphs import StepGraphs, default_sizes
from plimsoll_engine.step_inputs import StepInputs
from plimsoll_engine.termination import EngineFailure, FailureClass, Phase
from support.greedy_loop import generate
from support.recorded_steps import Rerunner, recording_runner
from support.tiny_models import FAMILIES, VOCAB_SIZE, save_tiny_model

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
BLOCK = 16


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (40, (1, 2, 4, 8, 16, 32, 40)),
        (256, (1, 2, 4, 8, *range(16, 257, 16))),
    ],
)
def test_sizes_go_up_to_the_largest_and_have_it(largest: int, sizes: tuple[int, ...]) -> None:
    assert default_sizes(largest) == sizes


def chunk(name: str, start: int, blocks: tuple[int, ...], tokens: int = 1) -> SequenceChunk:
    ids = tuple(range(start, start + tokens))
    return SequenceChunk(name, ids, start, blocks, SamplingParams(max_tokens=9))


class Seen:
    """A forward pass that keeps what it was given, and answers with each row's token id."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.inputs: StepInputs | None = None

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        self.inputs = inputs
        self.sizes.append(len(inputs.token_ids))
        return inputs.token_ids[:, None].float()


def captured(*sizes: int, width: int = 4) -> tuple[StepGraphs, Seen, Rerunner]:
    graphs, seen, recorder = StepGraphs(sizes, width, BLOCK, CPU), Seen(), Rerunner()
    graphs.capture(recorder, seen)
    return graphs, seen, recorder


def test_the_largest_is_recorded_first() -> None:
    _, seen, recorder = captured(4, 1, 2)
    # The first once more, for the shape of its result.
    assert seen.sizes == [4, 4, 2, 1]
    assert recorder.recorded == 3


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8)])
def test_a_batch_takes_the_smallest_that_holds_it_and_nobody_owns_the_rest(
    count: int, size: int
) -> None:
    graphs, seen, _ = captured(1, 2, 4, 8)
    # Everything was in use before.
    graphs.run(StepBatch(tuple(chunk(f"old-{row}", 40, (7, 8, 9)) for row in range(8))))
    batch = StepBatch(tuple(chunk(str(row), 17 + row, (row, 10 + row)) for row in range(count)))
    assert graphs.takes(batch)
    arranged, hidden = graphs.run(batch)
    assert seen.inputs is not None
    inputs = seen.inputs
    assert len(inputs.token_ids) == size
    assert hidden[:, 0].tolist() == [own.token_ids[0] for own in arranged.chunks]
    assert inputs.slots.tolist() == [
        *(own.block_ids[1] * BLOCK + own.start % BLOCK for own in arranged.chunks),
        *[-1] * (size - count),
    ]
    lens = inputs.attention.context_lens_tensor.tolist()
    assert lens == [*(own.start + 1 for own in arranged.chunks), *[0] * (size - count)]
    for row, own in enumerate(arranged.chunks):
        assert tuple(inputs.attention.block_tables[row, :2].tolist()) == own.block_ids


@pytest.mark.parametrize(
    "batch",
    [
        [chunk("prefill", 0, (0,), tokens=2)],
        [chunk("decode", 3, (0,)), chunk("prefill", 0, (1,), tokens=2)],
        [chunk("wide", 70, (0, 1, 2, 3, 4))],
        [chunk(str(row), 3, (row,)) for row in range(3)],
        [SequenceChunk("scored", (1,), 0, (0,), None, (), (1, 2), (0, 1), 1)],
    ],
    ids=["prefill", "mixed", "wider-than-the-tables", "more-than-the-largest", "prompt-logprobs"],
)
def test_what_was_not_recorded_is_not_taken(batch: list[SequenceChunk]) -> None:
    graphs, _, _ = captured(1, 2)
    assert not graphs.takes(StepBatch(tuple(batch)))


def test_tables_and_rows_follow_whoever_comes_grows_and_leaves() -> None:
    """Random batches: after each, every row's table is its sequence's, and those who stay among the
    first keep their row."""
    graphs, seen, _ = captured(1, 2, 4, 8, width=6)
    rng = random.Random(0)
    free = list(range(100))
    blocks: dict[str, tuple[int, ...]] = {}
    before: dict[str, int] = {}
    for step in range(300):
        for name in [name for name in blocks if rng.random() < 0.15]:
            free.extend(blocks.pop(name))
        if len(blocks) < 8 and rng.random() < 0.6:
            blocks[f"r{step}"] = ()
        for name, ids in blocks.items():
            if not ids or (len(ids) < 6 and rng.random() < 0.3):
                blocks[name] = (*ids, free.pop(rng.randrange(len(free))))
        if not blocks:
            before = {}
            continue
        names = rng.sample(list(blocks), len(blocks))
        batch = [chunk(name, len(blocks[name]) * BLOCK - 1, blocks[name]) for name in names]
        arranged, _ = graphs.run(StepBatch(tuple(batch)))
        assert sorted(own.request_id for own in arranged.chunks) == sorted(names)
        assert seen.inputs is not None
        for row, own in enumerate(arranged.chunks):
            table = seen.inputs.attention.block_tables[row, : len(own.block_ids)]
            assert tuple(table.tolist()) == own.block_ids, (step, own.request_id)
            if before.get(own.request_id, 99) < len(batch):
                assert before[own.request_id] == row
        before = {own.request_id: row for row, own in enumerate(arranged.chunks)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(FAMILIES["llama"], tmp_path_factory.mktemp("llama"))


def config_of(model: Path, **settings: Any) -> EngineConfig:
    defaults = {"max_num_seqs": 12, "max_num_batched_tokens": 64, "max_model_len": 128}
    return EngineConfig(
        model=str(model), device=DeviceType.CPU, device_memory=8 << 30, **{**defaults, **settings}
    )


def profiled(runner: ModelRunner, config: EngineConfig) -> ModelRunner:
    assert config.max_model_len is not None
    runner.profile(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
    )
    return runner


Open = Callable[..., tuple[ModelRunner, Rerunner]]


@pytest.fixture
def open_recording(model: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    def build(fail_at: int | None = None, **settings: Any) -> tuple[ModelRunner, Rerunner]:
        config, recorder = config_of(model, **settings), Rerunner(fail_at)
        return profiled(recording_runner(config, recorder, monkeypatch), config), recorder

    return build


def prompts_of(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 40)) for _ in range(count)]


def test_tokens_are_those_without_graphs_for_every_number_of_sequences(
    model: Path, open_recording: Open
) -> None:
    recording, recorder = open_recording()
    assert recorder.recorded == len(default_sizes(12))
    eager = ModelRunner(config_of(model), "cpu")
    eager.load()
    for count in range(1, 14):
        prompts = prompts_of(count)
        # They leave one by one, so that smaller batches follow larger ones.
        params = [SamplingParams(max_tokens=3 + row, temperature=0.0) for row in range(count)]
        before = recorder.replayed
        mine = generate(recording, prompts, params, block_size=BLOCK, budget=64)
        theirs = generate(eager, prompts, params, block_size=BLOCK, budget=64)
        assert [own.token_ids for own in mine] == [own.token_ids for own in theirs], count
        # Thirteen are one more than was recorded, until the first has left.
        assert recorder.replayed > before
    recording.shutdown()
    eager.shutdown()


def test_the_pool_moves_between_replays(model: Path, open_recording: Open) -> None:
    """Grown, shrunk to what is in use, grown again: what was stored is found, and rows left over
    have stored nothing anywhere."""
    recording, recorder = open_recording()
    eager = ModelRunner(config_of(model), "cpu")
    eager.load()
    prompt = tuple(prompts_of(1)[0][:BLOCK])
    sizes = (3, 40, 3, 500, 5)
    told: dict[str, list[int]] = {}
    for name, runner in (("recording", recording), ("eager", eager)):
        runner.resize_kv(3)
        tokens = list(prompt)
        first = SequenceChunk("r", prompt, 0, (2,), GREEDY)
        tokens.append(runner.execute(StepBatch((first,)))[0].token_id or 0)
        for num_blocks in sizes:
            runner.resize_kv(num_blocks)
            start = len(tokens) - 1
            step = SequenceChunk("r", (tokens[-1],), start, (2, 1), GREEDY)
            # Three rows in a graph of four: one is nobody's.
            others = (
                SequenceChunk("a", (1,), 0, (0,), GREEDY),
                SequenceChunk("b", (2,), 0, (num_blocks - 1,), GREEDY),
            )
            batch = (
                StepBatch((others[0], step, others[1])) if num_blocks > 3 else StepBatch((step,))
            )
            sampled = {own.request_id: own.token_id for own in runner.execute(batch)}
            tokens.append(sampled["r"] or 0)
        told[name] = tokens
    assert told["recording"] == told["eager"]
    assert recorder.replayed == len(sizes)
    recording.shutdown()
    eager.shutdown()


@torch.inference_mode()
def test_rows_left_over_store_nothing(open_recording: Open) -> None:
    recording, _ = open_recording()
    recording.resize_kv(8)
    layout = recording.cache.layout
    # Those that are committed alone: the others are addresses without memory.
    rows = recording.cache.rows[: layout.num_layers * 2 * layout.blocks_per_segment]
    rows.fill_(7.0)
    batch = StepBatch(tuple(SequenceChunk(str(n), (n,), 0, (n,), GREEDY) for n in range(5)))
    recording.execute(batch)
    by_block = rows.view(layout.num_layers, 2, layout.blocks_per_segment, layout.block_size, -1)
    # [blocks, places]
    touched = (by_block != 7.0).any(-1).any(0).any(0)
    assert touched[:, 0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert not touched[:, 1:].any()
    recording.shutdown()


@pytest.mark.parametrize(
    ("settings", "recorded"),
    [
        ({"enforce_eager": True}, 0),
        ({"cudagraph_capture_sizes": (2, 6)}, 2),
        ({"max_cudagraph_capture_size": 4}, 3),
    ],
)
def test_flags_choose_what_is_recorded(
    settings: dict[str, Any], recorded: int, open_recording: Open
) -> None:
    runner, recorder = open_recording(**settings)
    assert recorder.recorded == recorded
    prompts = prompts_of(3)
    generate(runner, prompts, GREEDY, block_size=BLOCK, budget=64)
    assert (recorder.replayed > 0) == (recorded > 0)
    runner.shutdown()


def test_no_memory_for_graphs_ends_the_start_with_figures(open_recording: Open) -> None:
    with pytest.raises(EngineFailure, match="--enforce-eager") as caught:
        open_recording(fail_at=2)
    failure = caught.value
    assert failure.failure_class is FailureClass.DEVICE_OOM_AT_START
    assert failure.phase is Phase.PROFILE
    assert failure.figures["largest_graph"] == 12
    assert failure.figures["graph_sizes"] == len(default_sizes(12))
    assert failure.suggestion == {"flag": "--max-cudagraph-capture-size", "value": 3}
