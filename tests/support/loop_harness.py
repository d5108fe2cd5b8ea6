"""An EngineLoop over the scripted executor, driven step by step, checked after each one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from plimsoll_engine.config import EngineConfig
from plimsoll_engine.engine_loop import EngineLoop
from plimsoll_engine.executor import StepBatch
from plimsoll_engine.reports import FinishedRequest, RequestOutput, StepStats
from plimsoll_engine.sampling_params import Request, SamplingParams
from support.scripted_executor import Script, ScriptedExecutor, count_up, figures


@dataclass
class ManualClock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class RecordingObserver:
    steps: list[StepStats] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    next_tokens: list[float] = field(default_factory=list)
    finished: list[FinishedRequest] = field(default_factory=list)

    def step_done(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def first_token(self, seconds_since_arrival: float) -> None:
        self.first_tokens.append(seconds_since_arrival)

    def next_token(self, seconds_since_previous: float) -> None:
        self.next_tokens.append(seconds_since_previous)

    def request_finished(self, request: FinishedRequest) -> None:
        self.finished.append(request)


def build_request(
    request_id: str, prompt: int, max_tokens: int, *, priority: int = 0, now: float = 0.0
) -> Request:
    """``prompt`` tokens of any value, exactly ``max_tokens`` new ones unless changed."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(request_id, tuple(range(prompt)), params, now, priority)


class LoopHarness:
    """``num_blocks`` is the pool at the configured utilization; one step takes ``seconds``."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        config: EngineConfig | None = None,
        script: Script = count_up,
        before_step: Callable[[StepBatch], None] | None = None,
        seconds: float = 0.1,
        segment_blocks: int = 1,
    ) -> None:
        self.config = config or EngineConfig(model="m", block_size=16)
        self.clock = ManualClock()
        self.observer = RecordingObserver()
        self.outputs: defaultdict[str, list[RequestOutput]] = defaultdict(list)
        self.executor = ScriptedExecutor(
            script,
            memory_figures=figures(num_blocks, utilization=self.config.gpu_memory_utilization),
            block_size=self.config.block_size,
            before_step=before_step,
            segment_blocks=segment_blocks,
        )
        self.loop = EngineLoop(self.config, self.executor, self.observer, self.clock)
        self._seconds = seconds

    def submit(
        self,
        request_id: str,
        prompt: int,
        max_tokens: int,
        *,
        priority: int = 0,
        prompt_token_ids: tuple[int, ...] | None = None,
        cache_salt: str | None = None,
        **params: object,
    ) -> None:
        """``prompt_token_ids`` takes the place of ``prompt`` tokens of any value."""
        request = build_request(
            request_id, prompt, max_tokens, priority=priority, now=self.clock.now
        )
        changed = replace(
            request,
            params=replace(request.params, **params),  # type: ignore[arg-type]
            prompt_token_ids=prompt_token_ids or request.prompt_token_ids,
            cache_salt=cache_salt,
        )
        self.executor.tokens[request_id] = dict(enumerate(changed.prompt_token_ids))
        self.loop.add(changed, self.outputs[request_id].append)

    def step(self) -> None:
        self.clock.now += self._seconds
        self.loop.step()
        self.loop.check()

    def run(self, max_steps: int = 2000) -> int:
        """Steps until nothing is left; the number of steps."""
        for taken in range(max_steps):
            if not self.loop.has_work:
                return taken
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps: {self.loop.snapshot()}")

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.new_token_ids]

    def final(self, request_id: str) -> RequestOutput:
        """The one output with a finish reason."""
        finals = [output for output in self.outputs[request_id] if output.finish_reason]
        assert len(finals) == 1, f"{request_id} has {len(finals)} final outputs"
        assert finals[0] is self.outputs[request_id][-1], "the final output is not the last"
        return finals[0]
