"""Tensor parallel ranks over gloo: the same tokens, honest figures, and one end for all of them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe
from pathlib import Path

import llguidance
import pytest

from plimsoll_engine.config import DeviceType, EngineConfig
from plimsoll_engine.executor import AllocationFailure
from plimsoll_engine.model_runner import ModelRunner
from plimsoll_engine.parallel.executor import TensorParallelExecutor, _Member
from plimsoll_engine.parallel.messages import Done, Heartbeat, MemoryUse
from plimsoll_engine.parallel.shard import allowed_sizes, check_size, divide
from plimsoll_engine.parallel.spawn import rank_environment
from plimsoll_engine.runner import build_executor
from plimsoll_engine.sampling_params import Grammar, SamplingParams
from plimsoll_engine.termination import EngineFailure, FailureClass
from support.engine_server import byte_tokenizer
from support.greedy_loop import generate
from support.tiny_models import FAMILIES, VOCAB_SIZE, save_tiny_model

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2)
DIGITS = SamplingParams(
    max_tokens=8,
    temperature=0.0,
    grammar=Grammar(llguidance.LLMatcher.grammar_from_regex("[0-9]{8}")),
)
PROMPTS = [random.Random(length).choices(range(VOCAB_SIZE), k=length) for length in (3, 40, 5)]
PARAMS = [GREEDY, GREEDY, DIGITS]
# Case B15: model X has 8 query and 2 KV heads, model Y 9 and 3. Neither inner width nor vocabulary
# divides by nine.
MODELS = {"x": FAMILIES["llama-tied-biased"], "y": FAMILIES["llama-9-3"]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {
        name: save_tiny_model(config, tmp_path_factory.mktemp(name))
        for name, config in MODELS.items()
    }
    for folder in folders.values():
        byte_tokenizer().save_pretrained(folder)
    return folders


def config_of(model: Path, size: int) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        device=DeviceType.CPU,
        device_memory=8 << 30,
        tensor_parallel_size=size,
        max_num_batched_tokens=64,
        max_num_seqs=8,
    )


@pytest.mark.parametrize(("name", "sizes"), [("x", (2, 4, 8)), ("y", (3, 9))])
def test_b15_every_allowed_size_gives_the_tokens_of_size_one(
    models: dict[str, Path], name: str, sizes: tuple[int, ...]
) -> None:
    lone = ModelRunner(config_of(models[name], 1), "cpu")
    limits = lone.load()
    expected = generate(lone, PROMPTS, PARAMS, block_size=16, budget=24)
    assert bytes(expected[-1].token_ids).isdigit()
    whole_block = lone.cache.layout.bytes_per_block
    assert allowed_sizes(limits.num_attention_heads, limits.num_kv_heads) == (1, *sizes)
    for size in sizes:
        executor = build_executor(config_of(models[name], size))
        try:
            assert executor.load() == limits
            figures = executor.profile(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=128)
            results = generate(executor, PROMPTS, PARAMS, block_size=16, budget=24)
        finally:
            executor.shutdown()
        assert [r.token_ids for r in results] == [r.token_ids for r in expected]
        # A rank holds whole heads: with more ranks than KV heads the fleet holds copies.
        copies = max(1, size // limits.num_kv_heads)
        assert figures.bytes_per_block == copies * whole_block
        assert figures.weights >= lone.decoder.num_bytes()


@pytest.mark.parametrize(("name", "size", "heads"), [("x", 3, (8, 2)), ("y", 2, (9, 3))])
def test_b15_size_that_does_not_divide_the_heads_is_refused(
    models: dict[str, Path], name: str, size: int, heads: tuple[int, int]
) -> None:
    executor = build_executor(config_of(models[name], size))
    with pytest.raises(EngineFailure) as refused:
        executor.load()
    executor.shutdown()
    failure = refused.value
    assert failure.failure_class is FailureClass.INVALID_CONFIGURATION
    assert failure.exit_status == 2
    assert f"{heads[0]} attention heads and {heads[1]} KV heads" in failure.message
    assert str(size) in failure.message
    assert failure.suggestion is not None
    assert failure.suggestion["flag"] == "--tensor-parallel-size"


def test_b15_half_a_head_is_never_planned() -> None:
    """X at size 4: one KV head per rank, the first two ranks the same one."""
    shards = [
        divide(
            num_heads=8, num_kv_heads=2, intermediate_size=190, vocab_size=1001, rank=rank, size=4
        )
        for rank in range(4)
    ]
    assert [tuple(shard.query_heads) for shard in shards] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [tuple(shard.kv_heads) for shard in shards] == [(0,), (0,), (1,), (1,)]
    # What does not divide evenly: no inner column twice or never, the vocabulary whole everywhere.
    assert [column for shard in shards for column in shard.intermediate] == list(range(190))
    assert {len(shard.vocabulary) for shard in shards} == {1001}
    assert not any(shard.vocabulary_divided for shard in shards)


def test_smollm2_heads_allow_one_three_and_nine() -> None:
    assert allowed_sizes(9, 3) == (1, 3, 9)
    with pytest.raises(EngineFailure, match="allowed: 1, 3, 9"):
        check_size(9, 3, 4)


@pytest.fixture
def pair(models: dict[str, Path]) -> Iterator[TensorParallelExecutor]:
    executor = TensorParallelExecutor(config_of(models["x"], 2), "cpu")
    executor.load()
    yield executor
    executor.shutdown()


def is_gone(pid: int) -> bool:
    """A process that has ended, or is ended and not yet collected. Its first thread can be dead
    while others still hold its pipes open."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            state = stat.read().rsplit(")", 1)[1].split()[0]
        return state == "Z" and len(os.listdir(f"/proc/{pid}/task")) == 1
    except FileNotFoundError:
        return True


def wait_for_end(pids: Sequence[int]) -> None:
    """A killed process closes its pipes a moment before it is gone."""
    deadline = time.monotonic() + 30
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() < deadline, f"some of {pids} live on"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("harm", "said"), [(signal.SIGKILL, "ended with status -9"), (signal.SIGSTOP, "hangs")]
)
def test_rank_that_dies_or_hangs_ends_the_group(
    pair: TensorParallelExecutor, harm: signal.Signals, said: str
) -> None:
    pids = pair.rank_pids
    os.kill(pids[1], harm)
    with pytest.raises(EngineFailure) as failed:
        generate(pair, PROMPTS, GREEDY, block_size=16)
    assert failed.value.failure_class is FailureClass.COLLECTIVE_FAILURE
    assert f"rank 1 of 2 {said}" in failed.value.message
    wait_for_end(pids)
    # And it stays so: the next call tells the same.
    with pytest.raises(EngineFailure, match="rank 1 of 2"):
        pair.memory()


@pytest.mark.parametrize(("entered", "hangs"), [((7, 6, 7), 1), ((7, 7, 7), None)])
def test_rank_that_beats_and_never_comes_is_told_from_a_long_step(
    models: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    entered: tuple[int, ...],
    hangs: int | None,
) -> None:
    """Its process lives, its step does not end: the others wait for it in a collective."""
    monkeypatch.setattr("plimsoll_engine.parallel.executor.LAG_TIMEOUT", 0.3)
    executor = TensorParallelExecutor(config_of(models["x"], 3), "cpu")
    pipes = [Pipe() for _ in entered]
    executor._members = [_Member(ours, time.monotonic()) for ours, _ in pipes]
    executor._pods, executor._beside_ranks = [range(3)], [0]
    ended = threading.Event()

    def play() -> None:
        """All ranks: beats, and in the end what they were asked for."""
        for beat in range(20):
            for (_, theirs), count in zip(pipes, entered, strict=True):
                with suppress(OSError):
                    theirs.send(Heartbeat(count))
                    if beat == 19:
                        theirs.send(Done(None, MemoryUse(1 << 30, 0, 0)))
            ended.wait(0.05)
        for _, theirs in pipes:
            theirs.close()

    playing = threading.Thread(target=play)
    playing.start()
    if hangs is None:
        executor.reclaim()
    else:
        with pytest.raises(EngineFailure, match=f"rank {hangs} of 3 hangs: the others wait"):
            executor.reclaim()
    ended.set()
    playing.join()
    executor.shutdown()


def test_dead_rank_is_found_while_nothing_runs(pair: TensorParallelExecutor) -> None:
    pid = pair.rank_pids[0]
    os.kill(pid, signal.SIGKILL)
    wait_for_end([pid])
    with pytest.raises(EngineFailure, match="rank 0 of 2 ended with status -9"):
        pair.memory()


def test_ranks_die_with_their_driver(pair: TensorParallelExecutor) -> None:
    pids = pair.rank_pids
    assert not any(is_gone(pid) for pid in pids)
    pair.shutdown()
    wait_for_end(pids)


DRIVER = """
import sys
from pathlib import Path
from engine.test_tensor_parallel import config_of
from plimsoll_engine.parallel.executor import TensorParallelExecutor
executor = TensorParallelExecutor(config_of(Path(sys.argv[1]), 2), "cpu")
executor.load()
print(*executor.rank_pids, flush=True)
sys.stdin.read()
"""


def test_ranks_die_with_a_driver_that_is_killed(models: dict[str, Path]) -> None:
    """SIGKILL leaves it no time to tell them."""
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(models["x"])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"},
    ) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2
        assert not any(is_gone(pid) for pid in pids)
        driver.kill()
    wait_for_end(pids)


def test_pool_growth_counts_all_ranks(pair: TensorParallelExecutor) -> None:
    figures = pair.profile(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=128)
    committed = pair.resize_kv(40)
    before = pair.memory()
    # Fits beside what one rank uses, not beside what both do.
    fits_for_one = before.free // figures.bytes_per_block + 1000
    with pytest.raises(AllocationFailure):
        pair.resize_kv(committed + fits_for_one)
    assert pair.resize_kv(committed) == committed
    after = pair.memory()
    assert after.total == before.total
    assert after.free_low_water <= after.free <= after.total


def test_threads_are_divided_among_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for threads, share in (("8", "2"), ("2", "1")):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        assert rank_environment("cpu", 4, alone=True)["OMP_NUM_THREADS"] == share
