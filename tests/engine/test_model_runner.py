"""The single-device executor on tiny random models, against transformers."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from plimsoll_engine.config import DeviceType, DType, EngineConfig
from plimsoll_engine.executor import AllocationFailure, TokenLogprob
from plimsoll_engine.model_runner import LOGITS_BYTES, ModelRunner
from plimsoll_engine.sampling_params import SamplingParams
from support.greedy_loop import Generated, generate
from support.tiny_models import (
    FAMILIES,
    VOCAB_SIZE,
    reference_greedy,
    reference_model,
    save_tiny_model,
)

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
GIB = 1 << 30


def random_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def open_runner(model: Path, **settings: Any) -> ModelRunner:
    config = EngineConfig(
        model=str(model), device=DeviceType.CPU, device_memory=8 * GIB, **settings
    )
    runner = ModelRunner(config, "cpu")
    runner.load()
    return runner


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(FAMILIES["llama"], tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def runner(llama: Path) -> Iterator[ModelRunner]:
    runner = open_runner(llama)
    yield runner
    runner.shutdown()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    save_tiny_model(FAMILIES[family], tmp_path)
    prompts = [random_prompt(length, length) for length in (1, 16, 37, 100)]
    model = reference_model(tmp_path)
    expected = [reference_greedy(model, prompt, GREEDY.max_tokens) for prompt in prompts]
    for block_size in (16, 32):
        runner = open_runner(tmp_path, block_size=block_size)
        results = generate(runner, prompts, GREEDY, block_size=block_size, budget=64)
        assert [list(result.token_ids) for result in results] == expected
        runner.shutdown()


# Case B12: positions of a chunk do not begin at zero.
B12_PROMPT = random_prompt(200, 12)
B12_PARAMS = SamplingParams(max_tokens=32, temperature=0.0, logprobs=5)
# 199: the boundary falls one token before the end of the prompt.
B12_BUDGETS = (4096, 40, 17, 16, 199)


@pytest.mark.parametrize("beside", [[], [random_prompt(150, 13)]], ids=["alone", "beside-another"])
def test_b12_chunks_do_not_change_the_answer(
    runner: ModelRunner, llama: Path, beside: list[list[int]]
) -> None:
    expected = reference_greedy(reference_model(llama), B12_PROMPT, B12_PARAMS.max_tokens)
    results = [
        generate(runner, [B12_PROMPT, *beside], B12_PARAMS, block_size=16, budget=budget)[0]
        for budget in B12_BUDGETS
    ]
    for result in results:
        assert list(result.token_ids) == expected
        assert logprob_difference(result, results[0]) < 1e-4


def logprob_difference(one: Generated, other: Generated) -> float:
    return max(
        abs(a.logprob - b.logprob)
        for mine, theirs in zip(one.samples, other.samples, strict=True)
        for a, b in zip(mine.logprobs, theirs.logprobs, strict=True)
    )


def test_preempted_sequence_gives_the_same_answer(runner: ModelRunner) -> None:
    prompts = [random_prompt(length, length) for length in (40, 50, 60)]
    undisturbed = generate(runner, prompts, GREEDY, block_size=16)
    disturbed = generate(
        runner, prompts, GREEDY, block_size=16, budget=24, preempt_after={0: 3, 2: 7}
    )
    assert [r.token_ids for r in disturbed] == [r.token_ids for r in undisturbed]


def test_prompt_logprobs_are_those_of_a_full_forward_pass(
    runner: ModelRunner, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two rows of logits at a time: many passes.
    monkeypatch.setitem(LOGITS_BYTES, "cpu", 2 * 4 * VOCAB_SIZE)
    prompt = random_prompt(45, 3)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=3)
    [result] = generate(runner, [prompt], params, block_size=16, budget=20)
    with torch.inference_mode():
        logits = reference_model(llama)(torch.tensor([prompt])).logits[0]
    expected = logits.log_softmax(-1)
    assert len(result.prompt_logprobs) == len(prompt) - 1
    for position, entries in enumerate(result.prompt_logprobs):
        assert isinstance(entries, tuple)
        row = expected[position]
        own: TokenLogprob = entries[0]
        assert own.token_id == prompt[position + 1]
        assert own.logprob == pytest.approx(float(row[own.token_id]), abs=1e-4)
        assert own.rank == int((row > row[own.token_id]).sum()) + 1
        assert [entry.token_id for entry in entries[1:]] == row.topk(3).indices.tolist()


def test_profiled_activations_hold_for_the_real_step(runner: ModelRunner) -> None:
    """Two layers foretell the peak of all of them."""
    figures = runner.profile(max_num_batched_tokens=512, max_num_seqs=16, max_model_len=512)
    assert figures.weights == runner.decoder.num_bytes()
    assert figures.runtime > 0
    runner.reclaim()
    prompts = [random_prompt(250, seed) for seed in (1, 2)]
    before = runner.memory(reset_low_water=True)
    generate(runner, prompts, GREEDY, block_size=16, budget=512)
    taken = before.free - runner.memory().free_low_water
    pool = (2 * (262 // 16 + 1) + 5 + runner.cache.layout.blocks_per_segment) * (
        figures.bytes_per_block
    )
    assert taken <= figures.activations + pool + (16 << 20)


def test_prompt_logprobs_stay_within_the_profiled_peak(tmp_path: Path) -> None:
    """All logits of the prompt at once would take 400 MiB, their logarithms as much again."""
    config = copy.deepcopy(FAMILIES["llama-tied-biased"])
    config.vocab_size = 1 << 18
    config.max_position_embeddings = 1024
    runner = open_runner(save_tiny_model(config, tmp_path))
    figures = runner.profile(max_num_batched_tokens=400, max_num_seqs=4, max_model_len=400)
    runner.resize_kv(64)
    runner.reclaim()
    before = runner.memory(reset_low_water=True)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=5)
    [result] = generate(runner, [random_prompt(380, 4)], params, block_size=16, budget=400)
    taken = before.free - runner.memory().free_low_water
    runner.shutdown()
    assert len(result.prompt_logprobs) == 379
    assert figures.activations < 300 << 20
    # A busy machine may see the peak of the one or of the other run only after a pass.
    assert taken <= figures.activations + LOGITS_BYTES["cpu"]


def test_pool_growth_beyond_the_limit_is_refused_and_changes_nothing(runner: ModelRunner) -> None:
    committed = runner.resize_kv(64)
    memory = runner.memory()
    too_many = memory.total // runner.cache.layout.bytes_per_block
    with pytest.raises(AllocationFailure) as refused:
        runner.resize_kv(too_many)
    assert refused.value.requested_bytes is not None
    assert refused.value.requested_bytes > memory.free
    assert runner.cache.num_blocks == committed
    runner.resize_kv(0)


def test_allocation_failure_in_a_step_is_told_and_survived(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompt(40, 1)
    [expected] = generate(runner, [prompt], GREEDY, block_size=16)

    def refuse(*arguments: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 12 bytes")

    with monkeypatch.context() as patch:
        patch.setattr(runner.decoder, "logits", refuse)
        with pytest.raises(AllocationFailure, match="can't allocate memory"):
            generate(runner, [prompt], GREEDY, block_size=16)
    runner.reclaim()
    assert generate(runner, [prompt], GREEDY, block_size=16) == [expected]


def test_seeded_sampling_does_not_depend_on_the_batch(runner: ModelRunner) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=7)
    prompts = [random_prompt(30, seed) for seed in range(4)]
    [alone] = generate(runner, prompts[:1], params, block_size=16)
    together = generate(runner, prompts, params, block_size=16, budget=33)
    preempted = generate(runner, prompts[:2], params, block_size=16, preempt_after={0: 5})
    assert together[0].token_ids == alone.token_ids
    assert preempted[0].token_ids == alone.token_ids
    [other_seed] = generate(
        runner,
        prompts[:1],
        SamplingParams(max_tokens=16, temperature=1.0, seed=8),
        block_size=16,
    )
    assert other_seed.token_ids != alone.token_ids


def test_lower_precision_stays_close(llama: Path) -> None:
    """bfloat16 runs the same path; its distribution is near the one in float32."""
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)
    prompt = random_prompt(40, 2)
    results = []
    for dtype in (DType.FLOAT32, DType.BFLOAT16):
        runner = ModelRunner(EngineConfig(model=str(llama), dtype=dtype), "cpu")
        assert runner.load().dtype == dtype.value
        results.append(generate(runner, [prompt], params, block_size=16)[0].samples[0])
        runner.shutdown()
    assert results[0].logprobs[0].logprob == pytest.approx(results[1].logprobs[0].logprob, abs=0.5)
