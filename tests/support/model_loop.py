"""A scheduler over a real executor, driven step by step; every step is checked."""

from __future__ import annotations

from plimsoll_engine.blocks import BlockPool
from plimsoll_engine.executor import Executor, StepBatch
from plimsoll_engine.sampling_params import Request
from plimsoll_engine.scheduler import Scheduler, SchedulerLimits
from plimsoll_engine.sequence import Sequence, build_chunk, find_stop


class ModelLoop:
    """Takes the executor's KV memory at the start and gives it back in ``close``."""

    def __init__(
        self, executor: Executor, *, caching: bool, blocks: int, budget: int, block_size: int = 16
    ) -> None:
        self.executor = executor
        self.pool = BlockPool(executor.resize_kv(blocks), blocks)
        self.scheduler = Scheduler(
            self.pool,
            block_size,
            SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=budget),
            prefix_caching=caching,
        )
        self.preemptions = 0

    def add(self, request: Request) -> Sequence:
        return self.scheduler.add(request)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.num_waiting)

    def step(self) -> None:
        step = self.scheduler.schedule()
        self.preemptions += len(step.preempted)
        if step.chunks:
            batch = StepBatch(tuple(build_chunk(c.sequence, c.start, c.count) for c in step.chunks))
            sampled = self.executor.execute(batch)
            self.scheduler.complete(
                step, {s.request_id: s.token_id for s in sampled if s.token_id is not None}
            )
        for chunk in step.chunks:
            if find_stop(chunk.sequence):
                self.scheduler.finish(chunk.sequence)
        self.scheduler.check()

    def run(self) -> None:
        while self.has_work:
            self.step()

    def close(self) -> None:
        self.executor.resize_kv(0)


def output_of(sequence: Sequence) -> list[int]:
    return sequence.tokens[sequence.num_prompt_tokens :]
