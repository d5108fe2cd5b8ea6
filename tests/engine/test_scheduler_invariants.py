"""Any order of requests, steps, refusals, aborts and moving limits keeps the engine's promises.

After every operation: free and owned blocks are all of them, no block has two owners, no request
is in two places, at most one preemption per step. At the end: every request has had exactly one
final output with all its tokens, and the pool is empty.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from plimsoll_engine.admission import Lengths, judge
from plimsoll_engine.config import EngineConfig
from plimsoll_engine.executor import AllocationFailure, StepBatch
from plimsoll_engine.limits import Limits, LimitsOutcome
from plimsoll_engine.reports import FinishReason
from support.loop_harness import LoopHarness
from support.scripted_executor import ScriptedExecutor

BLOCKS = 12
BLOCK = 4
CEILING = 40


def script(request_id: str, position: int) -> int:
    """Differs per request, so that an exchanged token is seen."""
    return (int(request_id) * 97 + position) % 1000


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        budget=st.integers(4, 64),
        seqs=st.integers(1, 4),
        watermark=st.sampled_from([0.0, 0.1, 0.3]),
        segment=st.sampled_from([1, 3]),
        caching=st.booleans(),
    )
    def start(self, budget: int, seqs: int, watermark: float, segment: int, caching: bool) -> None:
        config = EngineConfig(
            model="m",
            block_size=BLOCK,
            max_model_len=CEILING,
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            watermark=watermark,
            enable_prefix_caching=caching,
        )
        self.harness = LoopHarness(BLOCKS, config=config, script=script, segment_blocks=segment)
        self.bounds = (budget, seqs)
        self.sizes: dict[str, tuple[int, int]] = {}
        self.aborted: set[str] = set()
        self.revision = 0
        self.limits = 0

    @rule(
        sizes=st.lists(
            st.tuples(
                st.integers(1, 24), st.integers(1, 24), st.integers(0, 1), st.sampled_from([0, 8])
            ),
            min_size=1,
            max_size=5,
        )
    )
    def submit(self, sizes: list[tuple[int, int, int, int]]) -> None:
        self.submit_sizes(sizes)

    def submit_sizes(self, sizes: list[tuple[int, int, int, int]]) -> None:
        """Prompts that begin alike: up to their own length, and up to where one differs."""
        for prompt, output, priority, same in sizes:
            state = self.harness.loop.admission_state()
            refused = judge(state, [Lengths(prompt, output)])
            if refused is not None:
                assert refused.status in (400, 429)
                assert prompt + output > min(CEILING, state.admitted, state.usable_pool)
                continue
            request_id = str(len(self.sizes))
            self.sizes[request_id] = (prompt, output)
            own = tuple(range(500, 500 + max(0, prompt - same))) if same else ()
            tokens = (*range(prompt - len(own)), *own)
            self.harness.submit(
                request_id, prompt, output, priority=priority, prompt_token_ids=tokens
            )

    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        for _ in range(times):
            before = self.harness.loop.snapshot()
            self.harness.step()
            after = self.harness.loop.snapshot()
            preempted = after.preemptions - before.preemptions
            assert preempted <= 1
            refused = after.allocation_failures_caught > before.allocation_failures_caught
            if before.running + before.waiting and not preempted and not refused:
                assert after.steps > before.steps, "work, and nothing computed"

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.sizes)))
        self.harness.loop.abort(request_id)
        self.aborted.add(request_id)

    @rule(times=st.integers(1, 3))
    def refuse_memory(self, times: int) -> None:
        """The next steps of more than four tokens are refused, as many as ``times``."""
        left = [times]

        def refuse(batch: StepBatch) -> None:
            if left[0] and batch.num_tokens > 4:
                left[0] -= 1
                raise AllocationFailure("refused", 1)

        self.harness.executor.before_step = refuse

    @rule(
        blocks=st.integers(0, 15),
        length=st.integers(1, CEILING),
        seqs=st.integers(1, 4),
        budget=st.integers(4, 64),
        neighbour=st.integers(0, 4),
        long=st.sampled_from([None, 8, 16]),
        share=st.sampled_from([0.3, 0.7, 1.0]),
        watermark=st.sampled_from([0.0, 0.1, 0.4]),
    )
    def move_limits(
        self,
        blocks: int,
        length: int,
        seqs: int,
        budget: int,
        neighbour: int,
        long: int | None,
        share: float,
        watermark: float,
    ) -> None:
        executor = self.harness.executor
        executor.bytes_elsewhere = neighbour * executor.figures.bytes_per_block
        self.revision += 1
        asked = Limits(
            max_model_len=min(length, max(1, blocks * BLOCK)),
            gpu_memory_utilization=min(1.0, utilization_of(executor, blocks)),
            max_num_seqs=min(seqs, self.bounds[1]),
            max_num_batched_tokens=min(budget, self.bounds[0]),
            long_prompt_tokens=long,
            long_prompt_share=share,
            watermark=watermark,
        )
        before = self.harness.loop.snapshot()
        result = self.harness.loop.move_limits(self.revision, asked)
        after = self.harness.loop.snapshot()
        if result.outcome is LimitsOutcome.REJECTED:
            assert result.reason
            assert after.limits == before.limits
            assert after.limits_revision == before.limits_revision
            assert after.usable_blocks == before.usable_blocks
        else:
            assert result.effective == after.limits
            assert after.limits_revision == self.revision

    @invariant()
    def nothing_is_lost(self) -> None:
        self.harness.loop.check()
        snapshot = self.harness.loop.snapshot()
        live = snapshot.running + snapshot.waiting
        ended = sum(
            any(output.finish_reason for output in self.harness.outputs[request_id])
            for request_id in self.sizes
        )
        assert live + ended == len(self.sizes)

    def nobody_starves(self) -> None:
        """Everybody of now ends while newcomers of the same or a lower rank keep coming."""
        live = [
            request_id
            for request_id in self.sizes
            if not any(output.finish_reason for output in self.harness.outputs[request_id])
        ]
        pool = self.harness.loop.snapshot().usable_blocks
        # Alone, one after the other, each computed twice; and those that may pass have had the pool.
        bound = 2 * sum(sum(self.sizes[request_id]) for request_id in live) + pool * BLOCK
        for step in range(bound):
            if all(
                self.harness.outputs[each][-1:] and self.harness.outputs[each][-1].finish_reason
                for each in live
            ):
                return
            if step % 2 == 0 and self.harness.loop.snapshot().waiting < 4:
                self.submit_sizes([(3, 2, 1, 0)])
            self.harness.step()
        raise AssertionError(f"of {live} some have not ended in {bound} steps")

    def teardown(self) -> None:
        if not hasattr(self, "sizes"):
            return
        self.nobody_starves()
        self.harness.run()
        # One turn without work: a shrink that waited for an aborted request settles in it.
        self.harness.step()
        for request_id, (_, output) in self.sizes.items():
            final = self.harness.final(request_id)
            tokens = self.harness.tokens(request_id)
            assert tokens == [script(request_id, position) for position in range(len(tokens))]
            if final.finish_reason is FinishReason.LENGTH:
                assert len(tokens) == output
            else:
                assert final.finish_reason is FinishReason.ABORT
                assert request_id in self.aborted
        end = self.harness.loop.snapshot()
        assert (end.used_blocks, end.running, end.waiting) == (0, 0, 0)
        assert end.limits_outcome is LimitsOutcome.APPLIED
        # What a shrink gave up is the device's again, to the segment.
        assert end.committed_blocks - end.usable_blocks < self.harness.executor.segment_blocks


def utilization_of(executor: ScriptedExecutor, blocks: int) -> float:
    """At which exactly so many blocks fit."""
    figures = executor.figures
    fixed = figures.weights + figures.activations + figures.runtime
    return (fixed + (blocks + 0.5) * figures.bytes_per_block) / figures.total


EngineMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=30, deadline=None, derandomize=True
)
TestEngineMachine = EngineMachine.TestCase
