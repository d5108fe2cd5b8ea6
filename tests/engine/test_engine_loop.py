"""Limits that move, memory that is refused, and what a request is told, step by step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plimsoll_engine.config import EngineConfig
from plimsoll_engine.engine_loop import EngineLoop
from plimsoll_engine.executor import AllocationFailure, ModelLimits, StepBatch
from plimsoll_engine.limits import Limits, LimitsOutcome
from plimsoll_engine.reports import FinishReason
from plimsoll_engine.termination import EngineFailure, FailureClass, Phase
from support.loop_harness import LoopHarness, ManualClock, build_request
from support.scripted_executor import ScriptedExecutor, figures


def utilization_of(harness: LoopHarness, blocks: int) -> float:
    """At which exactly so many blocks fit."""
    f = harness.executor.figures
    return (f.weights + f.activations + f.runtime + (blocks + 0.5) * f.bytes_per_block) / f.total


def small(**changes: object) -> LoopHarness:
    settings = {"model": "m", "block_size": 16, "max_model_len": 256} | changes
    return LoopHarness(32, config=EngineConfig(**settings))  # type: ignore[arg-type]


class TestTokens:
    def test_a_request_ends_with_length_and_every_token_is_told_once(self) -> None:
        harness = small()
        harness.submit("r", 20, 5)
        harness.run()
        assert harness.tokens("r") == [3, 4, 5, 6, 7]
        assert harness.final("r").finish_reason is FinishReason.LENGTH

    @pytest.mark.parametrize(
        ("params", "tokens", "reason", "stopped_by"),
        [
            ({"eos_token_ids": frozenset({5}), "ignore_eos": False}, [3, 4, 5], "stop", None),
            ({"eos_token_ids": frozenset({5})}, [3, 4, 5, 6, 7, 8], "length", None),
            ({"stop_token_ids": frozenset({4})}, [3, 4], "stop", 4),
            ({"stop_token_ids": frozenset({4}), "min_tokens": 2}, [3, 4], "stop", 4),
            (
                {"stop_token_ids": frozenset({4}), "min_tokens": 3},
                [3, 4, 5, 6, 7, 8],
                "length",
                None,
            ),
        ],
    )
    def test_token_level_stops(
        self, params: dict[str, Any], tokens: list[int], reason: str, stopped_by: int | None
    ) -> None:
        harness = small()
        harness.submit("r", 4, 6, **params)
        harness.run()
        final = harness.final("r")
        assert harness.tokens("r") == tokens
        assert (final.finish_reason, final.stop_reason) == (reason, stopped_by)

    def test_zero_new_tokens_score_the_prompt_alone(self) -> None:
        harness = small(max_num_batched_tokens=16)
        harness.submit("r", 40, 0, prompt_logprobs=2)
        harness.run()
        assert harness.tokens("r") == []
        assert harness.final("r").finish_reason is FinishReason.LENGTH
        told = [row[0].token_id for out in harness.outputs["r"] for row in out.prompt_logprobs]
        assert told == list(range(1, 40))

    def test_prompt_logprobs_are_told_once_though_the_prompt_is_computed_twice(self) -> None:
        harness = LoopHarness(8, config=EngineConfig(model="m", block_size=4, max_model_len=24))
        harness.submit("a", 12, 12)
        harness.submit("b", 12, 12, prompt_logprobs=0, logprobs=1)
        harness.run()
        assert harness.final("b").preemptions >= 1
        told = [row[0].token_id for out in harness.outputs["b"] for row in out.prompt_logprobs]
        assert told == list(range(1, 12))
        assert sum(len(out.logprobs) for out in harness.outputs["b"]) == 12

    def test_a_failing_sink_costs_its_own_request_alone(self) -> None:
        harness = small()
        harness.submit("good", 4, 5)
        calls = []

        def fail(output: object) -> None:
            calls.append(output)
            raise ConnectionError("the client is gone")

        harness.loop.add(build_request("bad", 4, 5), fail)
        harness.run()
        assert harness.final("good").finish_reason is FinishReason.LENGTH
        assert len(calls) == 2  # its first token, and the end

    def test_observations_follow_the_clock(self) -> None:
        harness = small()
        harness.submit("r", 20, 3)
        harness.run()
        observer = harness.observer
        assert observer.first_tokens == pytest.approx([0.1])
        assert observer.next_tokens == pytest.approx([0.1, 0.1])
        assert [s.num_tokens for s in observer.steps] == [20, 1, 1]
        assert [s.prompt_tokens for s in observer.steps] == [20, 0, 0]
        assert [s.generation_tokens for s in observer.steps] == [1, 1, 1]
        (finished,) = observer.finished
        assert (finished.num_prompt_tokens, finished.num_generation_tokens) == (20, 3)
        assert finished.finished_time - finished.arrival_time == pytest.approx(0.3)


class TestLimits:
    def test_length_and_pool_move_at_once_when_nothing_is_in_the_way(self) -> None:
        harness = small()
        result = harness.loop.move_limits(
            1, Limits(max_model_len=128, gpu_memory_utilization=utilization_of(harness, 10))
        )
        assert result.outcome is LimitsOutcome.APPLIED
        now = harness.loop.snapshot()
        assert (now.usable_blocks, now.committed_blocks) == (10, 10)
        assert harness.executor.committed == 10
        assert now.limits.max_model_len == 128
        assert now.ceiling == 256
        assert now.largest_prompt_admissible == 127
        assert now.largest_prompt_startable == 127

        grown = harness.loop.move_limits(
            2, Limits(max_model_len=256, gpu_memory_utilization=utilization_of(harness, 30))
        )
        assert grown.outcome is LimitsOutcome.APPLIED
        assert harness.loop.snapshot().usable_blocks == harness.executor.committed == 30

    def test_the_bound_on_long_prompts_that_wait_moves_and_admission_follows(self) -> None:
        harness = small()
        assert harness.loop.admission_state().long_queue is None
        lane = Limits(long_prompt_tokens=50, long_prompt_share=0.5, long_queue_share=0.5)
        assert harness.loop.move_limits(1, lane).outcome is LimitsOutcome.APPLIED
        queue = harness.loop.admission_state().long_queue
        usable = harness.loop.snapshot().usable_blocks
        assert queue is not None
        assert queue.most == usable // 2 * harness.loop.admission_state().block_size
        harness.loop.move_limits(2, Limits(long_queue_share=1.0))
        moved = harness.loop.admission_state().long_queue
        assert moved is not None
        assert moved.most == 2 * queue.most
        assert harness.loop.snapshot().limits.long_prompt_tokens == 50

    def test_a_shrink_waits_for_the_blocks_above_the_line_then_gives_their_memory_back(
        self,
    ) -> None:
        harness = small()
        harness.submit("low", 100, 20)
        harness.submit("high", 100, 4)
        harness.step()
        result = harness.loop.move_limits(
            1, Limits(max_model_len=128, gpu_memory_utilization=utilization_of(harness, 8))
        )
        assert result.outcome is LimitsOutcome.DEFERRED
        assert "blocks above the line" in result.reason
        assert harness.loop.snapshot().usable_blocks == 8
        assert harness.executor.committed == 14
        harness.run()
        harness.step()
        now = harness.loop.snapshot()
        assert (now.limits_outcome, now.limits_reason) == (LimitsOutcome.APPLIED, "")
        assert harness.executor.committed == 8
        for request_id, tokens in (("low", 20), ("high", 4)):
            assert harness.final(request_id).finish_reason is FinishReason.LENGTH
            assert len(harness.tokens(request_id)) == tokens

    def test_a_shrink_below_the_largest_live_request_keeps_enough_for_it(self) -> None:
        harness = small()
        harness.submit("large", 100, 100)
        harness.submit("next", 10, 4)
        harness.step()
        result = harness.loop.move_limits(
            1, Limits(max_model_len=64, gpu_memory_utilization=utilization_of(harness, 4))
        )
        assert result.outcome is LimitsOutcome.DEFERRED
        assert "a live request needs 13 blocks, more than the 4" in result.reason
        assert harness.loop.snapshot().usable_blocks == 13
        harness.run()
        assert harness.final("large").finish_reason is FinishReason.LENGTH
        assert len(harness.tokens("large")) == 100
        assert harness.loop.snapshot().usable_blocks == 4

    def test_growth_is_clamped_to_what_is_really_free_and_says_so(self) -> None:
        harness = small()
        harness.loop.move_limits(
            1, Limits(max_model_len=128, gpu_memory_utilization=utilization_of(harness, 10))
        )
        # Free beyond the activations of the worst step: five blocks.
        f = harness.executor.figures
        harness.executor.bytes_elsewhere = (
            harness.executor.memory().free - f.activations - 5 * f.bytes_per_block
        )
        result = harness.loop.move_limits(
            2, Limits(gpu_memory_utilization=utilization_of(harness, 30))
        )
        assert result.outcome is LimitsOutcome.APPLIED
        assert "15 of 30 blocks" in result.reason
        assert harness.loop.snapshot().usable_blocks == 15

    @pytest.mark.parametrize(
        ("asked", "fragments"),
        [
            (Limits(max_model_len=257), ["max_model_len: 257", "1 to 256"]),
            (Limits(gpu_memory_utilization=1.5), ["gpu_memory_utilization: 1.5"]),
            (Limits(max_num_seqs=257), ["max_num_seqs: 257"]),
            (
                Limits(gpu_memory_utilization=0.8),
                ["admitted 256 tokens needs 16 blocks", "expected at least"],
            ),
        ],
    )
    def test_a_rejected_request_changes_nothing(self, asked: Limits, fragments: list[str]) -> None:
        harness = small()
        before = harness.loop.snapshot()
        result = harness.loop.move_limits(1, asked)
        assert result.outcome is LimitsOutcome.REJECTED
        assert all(fragment in result.reason for fragment in fragments), result.reason
        after = harness.loop.snapshot()
        assert (after.limits, after.limits_revision) == (before.limits, 0)
        assert after.usable_blocks == before.usable_blocks

    def test_revisions_only_rise_and_one_revision_has_one_content(self) -> None:
        harness = small()
        move = harness.loop.move_limits
        assert move(3, Limits(max_model_len=100)).outcome is LimitsOutcome.APPLIED
        assert move(3, Limits(max_model_len=100)).outcome is LimitsOutcome.APPLIED
        other = move(3, Limits(max_model_len=90))
        assert (other.outcome, other.effective.max_model_len) == (LimitsOutcome.REJECTED, 100)
        stale = move(2, Limits(max_model_len=80))
        assert (stale.outcome, stale.revision) == (LimitsOutcome.REJECTED, 3)
        assert "stale" in stale.reason

    def test_a_request_accepted_just_before_a_shrink_is_served(self) -> None:
        harness = small()
        harness.loop.move_limits(
            1, Limits(max_model_len=64, gpu_memory_utilization=utilization_of(harness, 4))
        )
        # It was judged by the state before; the line rises for it, and falls again.
        harness.submit("r", 100, 20)
        harness.run()
        assert len(harness.tokens("r")) == 20
        harness.step()
        assert harness.loop.snapshot().usable_blocks == harness.executor.committed == 4


class TestStart:
    def test_the_limits_file_is_in_force_from_the_start(self, tmp_path: Path) -> None:
        path = tmp_path / "limits.json"
        utilization = utilization_of(small(), 12)
        limits = {"maxModelLen": 100, "gpuMemoryUtilization": utilization, "maxNumSeqs": 3}
        path.write_text(json.dumps({"revision": 9, "limits": limits}))
        now = small(limits_file=path).loop.snapshot()
        assert (now.ceiling, now.usable_blocks, now.limits_revision) == (256, 12, 9)
        assert (now.limits.max_model_len, now.limits.max_num_seqs) == (100, 3)

    def test_a_pool_too_small_for_the_ceiling_lowers_the_admitted_length(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "limits.json"
        limits = {"gpuMemoryUtilization": utilization_of(small(), 8)}
        path.write_text(json.dumps({"revision": 1, "limits": limits}))
        now = small(limits_file=path).loop.snapshot()
        assert (now.ceiling, now.limits.max_model_len, now.usable_blocks) == (256, 128, 8)

    @pytest.mark.parametrize(
        "content",
        [
            "garbage",
            '{"revision": 1, "limits": {"maxModelLen": 9999}}',
            '{"revision": 1, "limits": {"gpuMemoryUtilization": 0.01}}',
        ],
    )
    def test_a_useless_limits_file_leaves_the_flags_in_force(
        self, tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = tmp_path / "limits.json"
        path.write_text(content)
        now = small(limits_file=path).loop.snapshot()
        assert (now.limits.max_model_len, now.usable_blocks) == (256, 32)
        assert "limits file" in caplog.text

    def test_profiling_out_of_memory_names_the_batch_to_lower(self) -> None:
        class Refusing(ScriptedExecutor):
            def profile(self, **sizes: int) -> object:  # type: ignore[override]
                raise AllocationFailure("no memory", 123)

        with pytest.raises(EngineFailure) as caught:
            EngineLoop(EngineConfig(model="m"), Refusing(), None, ManualClock())  # type: ignore[arg-type]
        assert caught.value.failure_class is FailureClass.DEVICE_OOM_AT_START
        assert caught.value.phase is Phase.PROFILE
        assert caught.value.suggestion == {"flag": "--max-num-batched-tokens", "value": 1024}

    def test_a_length_beyond_the_model_never_gets_as_far_as_profiling(self) -> None:
        executor = ScriptedExecutor(
            limits=ModelLimits(1000, 2048, 2, 4, 2, 64, "float32"), memory_figures=figures(900)
        )
        with pytest.raises(EngineFailure, match=r"8192.*2048"):
            EngineLoop(EngineConfig(model="m", max_model_len=8192), executor, None, ManualClock())
        assert not executor.profiled


class TestRefusedMemory:
    def test_a_refused_step_is_halved_and_nothing_is_lost(self) -> None:
        def refuse(batch: StepBatch) -> None:
            if batch.num_tokens > 40:
                raise AllocationFailure("too wide")

        harness = small()
        harness.executor.before_step = refuse
        for name in "abc":
            harness.submit(name, 50, 4)
        harness.run()
        now = harness.loop.snapshot()
        assert now.allocation_failures_caught == 2  # 150 and 75 tokens
        assert harness.executor.reclaimed == 2
        for name in "abc":
            assert harness.tokens(name) == [3, 4, 5, 6]

    def test_the_full_budget_comes_back_slowly(self) -> None:
        widths: list[int] = []

        def refuse(batch: StepBatch) -> None:
            widths.append(batch.num_tokens)
            if len(widths) == 1:
                raise AllocationFailure("once")

        harness = small(max_num_batched_tokens=200)
        harness.executor.before_step = refuse
        harness.submit("first", 200, 1)
        harness.run()
        assert widths == [200, 100, 100]
        for number in range(40):
            tokens = tuple(range(number, number + 200))
            harness.submit(str(number), 200, 1, prompt_token_ids=tokens)
        harness.run()
        # 32 steps of half the tokens, then all of them again.
        assert max(widths[1:33]) == 100
        assert max(widths[33:]) == 200

    def test_a_request_that_is_refused_alone_ends_with_an_error_and_others_go_on(self) -> None:
        def refuse(batch: StepBatch) -> None:
            if any(chunk.request_id == "bad" for chunk in batch.chunks):
                raise AllocationFailure("this one is too much")

        harness = small()
        harness.executor.before_step = refuse
        harness.submit("bad", 30, 4)
        harness.submit("good", 30, 4)
        harness.run()
        assert harness.final("bad").finish_reason is FinishReason.ERROR
        assert "out of device memory" in (harness.final("bad").error or "")
        assert harness.tokens("good") == [3, 4, 5, 6]
        assert harness.loop.snapshot().used_blocks == 0

    def test_a_device_that_gives_nothing_any_more_ends_the_engine(self) -> None:
        def refuse(batch: StepBatch) -> None:
            raise AllocationFailure("nothing left", 4096)

        harness = small()
        harness.executor.before_step = refuse
        for number in range(9):
            harness.submit(str(number), 30, 4)
        with pytest.raises(EngineFailure) as caught:
            harness.run()
        assert caught.value.failure_class is FailureClass.DEVICE_OOM_AT_RUNTIME
        assert caught.value.figures["requested_bytes"] == 4096
