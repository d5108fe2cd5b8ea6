"""The pool of a real engine moves while it serves: what the plan says is what the process holds."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from plimsoll_engine import host_memory
from plimsoll_engine.config import DeviceType, EngineConfig
from plimsoll_engine.engine_loop import EngineLoop
from plimsoll_engine.limits import Limits, LimitsOutcome
from plimsoll_engine.model_runner import ModelRunner
from plimsoll_engine.reports import RequestOutput
from plimsoll_engine.sampling_params import Request, SamplingParams
from support.tiny_models import FAMILIES, VOCAB_SIZE, save_tiny_model

MIB = 1 << 20
# Of what the allocator keeps or gives back beside the pool.
NOISE = 8 * MIB


class LivePool:
    def __init__(self, model: Path) -> None:
        config = EngineConfig(
            model=str(model),
            device=DeviceType.CPU,
            device_memory=host_memory.used_bytes() + 500 * MIB,
            gpu_memory_utilization=0.95,
            max_num_batched_tokens=64,
            max_num_seqs=8,
            max_model_len=256,
        )
        self.runner = ModelRunner(config, "cpu")
        self.loop = EngineLoop(config, self.runner, None, time.time)
        self.outputs: defaultdict[str, list[RequestOutput]] = defaultdict(list)
        self.revision = 0

    def submit(self, name: str, prompt: int, output: int) -> None:
        ids = tuple(random.Random(prompt).choices(range(VOCAB_SIZE), k=prompt))
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        self.loop.add(Request(name, ids, params, 0.0), self.outputs[name].append)

    def finish(self) -> None:
        while self.loop.has_work:
            self.loop.step()
        self.loop.step()
        self.loop.check()

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.new_token_ids]

    def move(self, utilization: float) -> LimitsOutcome:
        self.revision += 1
        asked = Limits(gpu_memory_utilization=utilization)
        result = self.loop.move_limits(self.revision, asked)
        assert result.outcome is not LimitsOutcome.REJECTED, result.reason
        return result.outcome

    def pool_bytes(self) -> int:
        snapshot = self.loop.snapshot()
        return snapshot.committed_blocks * snapshot.bytes_per_block

    def check_plan(self) -> None:
        """Planned and actual bytes of each class, and their sum against the process."""
        classes = {each.name: each for each in self.loop.snapshot().classes}
        kv = classes["kv_cache"]
        segment = self.runner.cache.layout.segment_bytes
        assert kv.planned_bytes <= kv.actual_bytes < kv.planned_bytes + segment
        assert kv.actual_bytes == self.pool_bytes()
        assert classes["weights"].actual_bytes == self.runner.decoder.num_bytes()
        assert classes["activations"].actual_bytes <= classes["activations"].planned_bytes + NOISE


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LivePool]:
    live = LivePool(save_tiny_model(FAMILIES["llama"], tmp_path))
    yield live
    live.runner.shutdown()


def test_what_a_shrink_gives_up_goes_back_to_the_system(live: LivePool) -> None:
    live.submit("before", 100, 20)
    live.finish()
    live.check_plan()
    pool, used = live.pool_bytes(), host_memory.used_bytes()
    assert pool > 200 * MIB
    # In bytes: how much of the whole they are depends on what this process held before.
    less = 0.95 - 150 * MIB / live.runner.memory().total
    assert live.move(less) is LimitsOutcome.APPLIED
    given_up = pool - live.pool_bytes()
    assert given_up > 100 * MIB
    assert abs(used - host_memory.used_bytes() - given_up) < NOISE
    live.check_plan()
    # What is left works, and so does what comes back.
    live.submit("smaller", 100, 20)
    live.finish()
    assert live.move(0.95) is LimitsOutcome.APPLIED
    assert live.pool_bytes() == pool
    assert abs(host_memory.used_bytes() - used) < NOISE
    live.check_plan()
    live.submit("larger", 100, 20)
    live.finish()
    assert live.tokens("before") == live.tokens("smaller") == live.tokens("larger")


def test_a_shrink_under_running_requests_is_deferred_and_then_real(live: LivePool) -> None:
    names = [f"{prompt}" for prompt in range(180, 188)]
    for name in names:
        live.submit(name, int(name), 60)
    for _ in range(40):
        live.loop.step()
    used = host_memory.used_bytes()
    blocks = live.loop.snapshot().used_blocks
    least = live.loop.snapshot().bytes_per_block * (blocks // 2)
    total = live.loop.snapshot().device.total
    fixed = sum(
        each.planned_bytes for each in live.loop.snapshot().classes if each.name != "kv_cache"
    )
    assert live.move((fixed + least) / total) is LimitsOutcome.DEFERRED
    # Those above the line are still owned; everything higher has gone back at once.
    assert used - host_memory.used_bytes() > 100 * MIB
    live.finish()
    snapshot = live.loop.snapshot()
    assert snapshot.usable_blocks <= blocks // 2
    assert snapshot.limits_revision == live.revision
    live.check_plan()
    # One by one in the smaller pool: the same tokens.
    for name in names:
        again = f"again {name}"
        live.submit(again, int(name), 60)
        live.finish()
        assert live.tokens(again) == live.tokens(name)
