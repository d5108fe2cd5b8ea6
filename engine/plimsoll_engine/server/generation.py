"""One HTTP request's sequences in the core: submitted together, read as one stream, always ended.

In: prompts with sampling parameters. Out: ChoiceDelta values, the same for streamed and plain
answers. Leaving the context aborts whatever still waits or runs, so a client that goes away costs
nothing more. This module knows neither HTTP nor JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from plimsoll_engine.admission import Refused
from plimsoll_engine.core import Sink
from plimsoll_engine.detokenizer import Detokenizer, TokenDecoder
from plimsoll_engine.executor import TokenLogprob
from plimsoll_engine.reports import FinishReason, RequestOutput
from plimsoll_engine.sampling_params import Request, SamplingParams
from plimsoll_engine.server.errors import ApiError, refused


class Core(Protocol):
    """The part of EngineCore that a generation needs."""

    def submit_all(self, requests: Sequence[tuple[Request, Sink]]) -> None: ...

    def abort(self, request_id: str, reason: FinishReason = ...) -> None: ...


@dataclass(frozen=True)
class ChoiceDelta:
    """News of one choice. ``finish_reason`` is set in its last delta, which has all the rest."""

    index: int
    text: str
    # One entry per new token, the token itself first, then the alternatives.
    logprobs: tuple[tuple[TokenLogprob, ...], ...]
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...]
    # Tokens of this choice so far.
    num_tokens: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    # Tokens of its prompt that were found in the prefix cache.
    num_cached_tokens: int = 0


class _Choice:
    def __init__(self, index: int, request: Request, decoder: TokenDecoder) -> None:
        params = request.params
        self.index = index
        self.request = request
        self.finished = False
        self._num_tokens = 0
        self._show_stop_token = params.include_stop_str_in_output
        self._detokenizer = Detokenizer(
            decoder,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
            prompt_token_ids=request.prompt_token_ids,
        )

    def read(self, output: RequestOutput) -> ChoiceDelta:
        """Raises ApiError: 500 when the engine failed on this request, or why it was refused."""
        if output.finish_reason is FinishReason.ERROR:
            self.finished = True
            if output.refused is not None:
                raise refused(output.refused)
            raise ApiError(500, output.error or "The engine failed on this request")
        token_ids = output.new_token_ids
        finish_reason, stop_reason = output.finish_reason, output.stop_reason
        hidden = finish_reason is FinishReason.STOP and not self._show_stop_token
        update = self._detokenizer.add(token_ids[:-1] if hidden else token_ids)
        text, num_new = update.text, len(token_ids)
        if update.stop is not None:
            finish_reason, stop_reason = FinishReason.STOP, update.stop
            num_new = update.num_tokens
        elif finish_reason is not None:
            rest = self._detokenizer.finish()
            text += rest.text
            if rest.stop is not None:
                finish_reason, stop_reason = FinishReason.STOP, rest.stop
        self._num_tokens += num_new
        self.finished = finish_reason is not None
        return ChoiceDelta(
            self.index,
            text,
            output.logprobs[:num_new],
            output.prompt_logprobs,
            self._num_tokens,
            finish_reason,
            stop_reason,
            output.num_cached_tokens,
        )


class Generation:
    """Use as ``async with``: entering submits, leaving aborts what has not ended by itself."""

    def __init__(
        self,
        core: Core,
        decoder: TokenDecoder,
        sequences: Sequence[tuple[tuple[int, ...], SamplingParams]],
        *,
        arrival_time: float,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        self._core = core
        self._loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[tuple[_Choice, RequestOutput]] = asyncio.Queue()
        # Not the client's id: two requests may carry the same one.
        prefix = uuid.uuid4().hex
        self._choices = [
            _Choice(
                index,
                Request(f"{prefix}-{index}", token_ids, params, arrival_time, priority, cache_salt),
                decoder,
            )
            for index, (token_ids, params) in enumerate(sequences)
        ]

    async def __aenter__(self) -> Self:
        """Raises ApiError when the core refuses the sequences; it takes all or none."""
        try:
            self._core.submit_all([(each.request, self._sink(each)) for each in self._choices])
        except Refused as refusal:
            raise refused(refusal) from None
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._abort_unfinished()

    async def __aiter__(self) -> AsyncIterator[ChoiceDelta]:
        """Ends when every choice has. Raises ApiError when the engine fails on one."""
        unfinished = len(self._choices)
        while unfinished:
            choice, output = await self._outputs.get()
            # After a stop string the core may still send what it had computed, and the abort.
            if choice.finished:
                continue
            delta = choice.read(output)
            if choice.finished:
                unfinished -= 1
                if output.finish_reason is None:
                    self._core.abort(choice.request.request_id, FinishReason.STOP)
            yield delta

    def _sink(self, choice: _Choice) -> Sink:
        def put(output: RequestOutput) -> None:
            # The loop is closed only at the very end of the process: nobody waits any more.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._outputs.put_nowait, (choice, output))

        return put

    def _abort_unfinished(self) -> None:
        for choice in self._choices:
            if not choice.finished:
                choice.finished = True
                self._core.abort(choice.request.request_id)
