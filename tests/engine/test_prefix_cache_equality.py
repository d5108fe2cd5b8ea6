"""A real model gives the same tokens with and without the prefix cache, preempted or not."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from plimsoll_engine.blocks import BlockPool
from plimsoll_engine.config import DeviceType, DType, EngineConfig
from plimsoll_engine.executor import Executor, StepBatch
from plimsoll_engine.runner import build_executor
from plimsoll_engine.sampling_params import Request, SamplingParams
from plimsoll_engine.scheduler import Scheduler, SchedulerLimits
from plimsoll_engine.sequence import build_chunk, find_stop
from support.tiny_models import FAMILIES, VOCAB_SIZE, save_tiny_model

BLOCK = 16


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
    pool = BlockPool(executor.resize_kv(blocks), blocks)
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=budget)
    scheduler = Scheduler(pool, BLOCK, limits, prefix_caching=caching)
    arriving = list(requests)
    sequences = {}
    steps = preemptions = 0
    while arriving or scheduler.running or scheduler.waiting:
        if steps % 3 == 0:
            for request in arriving[:2]:
                sequences[request.request_id] = scheduler.add(request)
            del arriving[:2]
        steps += 1
        step = scheduler.schedule()
        preemptions += len(step.preempted)
        if not step.chunks:
            continue
        batch = StepBatch(tuple(build_chunk(c.sequence, c.start, c.count) for c in step.chunks))
        sampled = executor.execute(batch)
        scheduler.complete(
            step, {s.request_id: s.token_id for s in sampled if s.token_id is not None}
        )
        for chunk in step.chunks:
            if find_stop(chunk.sequence):
                scheduler.finish(chunk.sequence)
        scheduler.check()
    executor.resize_kv(0)
    tokens = {name: s.tokens[s.num_prompt_tokens :] for name, s in sequences.items()}
    return Served(tokens, scheduler.prefix_cache_use.hits, preemptions)


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
