"""A real model gives the same tokens with and without the prefix cache, preempted or not."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from plimsoll_engine.config import DeviceType, DType, EngineConfig
from plimsoll_engine.executor import Executor
from plimsoll_engine.runner import build_executor
from plimsoll_engine.sampling_params import Request, SamplingParams
from support.model_loop import ModelLoop, output_of
from support.tiny_models import FAMILIES, VOCAB_SIZE, save_tiny_model


@dataclass(frozen=True)
class Served:
    tokens: dict[str, list[int]]
    hits: int
    preemptions: int


def overlapping_requests(seed: int, count: int = 12) -> list[Request]:
    """Prompts that begin with pieces of a few stems, of any length, some of them whole."""
    draw = random.Random(seed)
    stems = [draw.choices(range(VOCAB_SIZE), k=90) for _ in range(3)]
    requests = []
    for number in range(count):
        stem = draw.choice(stems)[: draw.randint(1, 90)]
        tail = draw.choices(range(VOCAB_SIZE), k=draw.choice([0, 1, 20]))
        params = SamplingParams(max_tokens=draw.randint(1, 40), temperature=0.0)
        salt = draw.choice([None, None, None, "tenant"])
        requests.append(
            Request(str(number), (*stem, *tail), params, arrival_time=0.0, cache_salt=salt)
        )
    return requests


def serve(
    executor: Executor, requests: Sequence[Request], *, caching: bool, blocks: int, budget: int
) -> Served:
    """Two requests arrive in every third step."""
    loop = ModelLoop(executor, caching=caching, blocks=blocks, budget=budget)
    arriving = list(requests)
    sequences = {}
    steps = 0
    while arriving or loop.has_work:
        if steps % 3 == 0:
            for request in arriving[:2]:
                sequences[request.request_id] = loop.add(request)
            del arriving[:2]
        steps += 1
        loop.step()
    loop.close()
    return Served(
        {name: output_of(sequence) for name, sequence in sequences.items()},
        loop.scheduler.prefix_cache_use.hits,
        loop.preemptions,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(FAMILIES["llama"], tmp_path_factory.mktemp("llama"))


def open_executor(model: Path, ranks: int = 1) -> Executor:
    config = EngineConfig(
        model=str(model),
        device=DeviceType.CPU,
        dtype=DType.FLOAT32,
        device_memory=8 << 30,
        tensor_parallel_size=ranks,
        max_num_batched_tokens=64,
        max_num_seqs=8,
    )
    executor = build_executor(config)
    executor.load()
    return executor


@pytest.fixture(scope="module")
def executor(model: Path) -> Iterator[Executor]:
    executor = open_executor(model)
    yield executor
    executor.shutdown()


# In blocks: room for all, then so little that requests are preempted and cached blocks evicted.
@pytest.mark.parametrize(("blocks", "preempts"), [(64, False), (14, True)])
@pytest.mark.parametrize("seed", range(3))
def test_the_cache_does_not_change_the_answers(
    executor: Executor, seed: int, blocks: int, preempts: bool
) -> None:
    requests = overlapping_requests(seed)
    without = serve(executor, requests, caching=False, blocks=200, budget=64)
    cached = serve(executor, requests, caching=True, blocks=blocks, budget=48)
    assert cached.tokens == without.tokens
    assert all(
        len(cached.tokens[request.request_id]) == request.params.max_tokens for request in requests
    )
    assert cached.hits > 0
    assert (without.hits, without.preemptions) == (0, 0)
    assert (cached.preemptions > 0) == preempts


def test_ranks_follow_the_block_tables_alone(executor: Executor, model: Path) -> None:
    stem = tuple(random.Random(9).choices(range(VOCAB_SIZE), k=40))
    params = SamplingParams(max_tokens=6, temperature=0.0)
    requests = [
        Request(str(number), (*stem, *range(number)), params, arrival_time=0.0)
        for number in range(4)
    ]
    ranks = open_executor(model, ranks=2)
    try:
        cached = serve(ranks, requests, caching=True, blocks=12, budget=48)
    finally:
        ranks.shutdown()
    assert cached.tokens == serve(executor, requests, caching=False, blocks=200, budget=64).tokens
    # The third and the fourth find two blocks each.
    assert cached.hits == 64


def answer(
    loop: ModelLoop, prompt: Sequence[int], *, end_after: int | None = None
) -> tuple[list[int], int]:
    """Output and cached tokens of one greedy request, alone. ``end_after`` so many tokens it is
    ended from outside, as a stop string does it."""
    params = SamplingParams(max_tokens=24, temperature=0.0)
    sequence = loop.add(Request("r", tuple(prompt), params, arrival_time=0.0))
    while loop.has_work:
        loop.step()
        if sequence.num_output_tokens == end_after:
            loop.scheduler.finish(sequence)
    return output_of(sequence), sequence.cached_tokens


def answers_without_cache(executor: Executor, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    loop = ModelLoop(executor, caching=False, blocks=64, budget=20)
    answers = [answer(loop, prompt)[0] for prompt in prompts]
    loop.close()
    return answers


def test_b13_a_hit_does_not_change_the_answer(executor: Executor) -> None:
    draw = random.Random(13)
    p = draw.choices(range(VOCAB_SIZE), k=48)
    other = [*p[:5], (p[5] + 1) % VOCAB_SIZE, *p[6:]]
    prompts = [p, [*p, 7], [*p, *draw.choices(range(VOCAB_SIZE), k=20)], other]
    expected = answers_without_cache(executor, prompts)

    loop = ModelLoop(executor, caching=True, blocks=64, budget=20)
    # It ends with its ninth token, in the middle of a block.
    answer(loop, p, end_after=9)
    for prompt, tokens, found in zip(
        prompts, expected, [(32, 32), (48, 48), (48, 64), (0, 32)], strict=True
    ):
        for cached in found:
            assert answer(loop, prompt) == (tokens, cached)
    loop.close()


def test_b13_nothing_is_found_before_it_is_computed_nor_of_what_was_aborted(
    executor: Executor,
) -> None:
    p = random.Random(14).choices(range(VOCAB_SIZE), k=48)
    (expected,) = answers_without_cache(executor, [p])
    loop = ModelLoop(executor, caching=True, blocks=64, budget=20)
    params = SamplingParams(max_tokens=24, temperature=0.0)
    # 20 tokens are computed: one block, and four tokens of the next.
    aborted = loop.add(Request("aborted", tuple(p), params, arrival_time=0.0))
    loop.step()
    loop.scheduler.finish(aborted)
    first = loop.add(Request("first", tuple(p), params, arrival_time=0.0))
    second = loop.add(Request("second", tuple(p), params, arrival_time=0.0))
    loop.run()
    # The second entered the step in which the first computed the last twelve tokens of 48.
    assert (first.cached_tokens, second.cached_tokens) == (16, 32)
    assert output_of(first) == output_of(second) == expected
    loop.close()
