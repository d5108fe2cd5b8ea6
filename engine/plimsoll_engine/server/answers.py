"""Deltas of a generation -> the JSON of an answer, streamed or whole.

An answer cuts every delta into parts. A stream sends each part as a chunk; a whole answer joins
the very same parts. So both modes say the same, by construction.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from plimsoll_engine.executor import TokenLogprob
from plimsoll_engine.reports import FinishReason
from plimsoll_engine.server.errors import SERVER_FAILED, ApiError
from plimsoll_engine.server.generation import ChoiceDelta
from plimsoll_engine.server.logprobs import (
    CompletionLogprobs,
    TokenText,
    chat_logprobs,
    extend_logprobs,
)
from plimsoll_engine.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from plimsoll_engine.server.text import Prompt

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Part:
    """A piece of one choice. ``logprobs`` has the endpoint's own shape; the last part of a choice
    has a finish reason and no text, so that all text comes before it."""

    index: int
    text: str = ""
    logprobs: Any = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    # Begins a chat choice and says who speaks.
    opening: bool = False


@dataclass(frozen=True)
class UsageShown:
    """What of usage is told: how many tokens of prompts were cached; in streams, unasked."""

    details: bool = True
    always: bool = False


USAGE_AS_ASKED = UsageShown()


class Answer(ABC):
    """Counts usage, and frames parts as chunks or as a whole."""

    kind: str
    chunk_kind: str

    def __init__(
        self,
        request: GenerationRequest,
        *,
        answer_id: str,
        model: str,
        prompts: Sequence[Prompt],
        token_text: TokenText,
        usage: UsageShown = USAGE_AS_ASKED,
    ) -> None:
        self._answer_id = answer_id
        self._model = model
        self._prompts = prompts
        self._token_text = token_text
        self._n = request.n or 1
        self._include_usage = request.include_usage or usage.always
        self._continuous_usage = self._include_usage and request.continuous_usage
        self._details = usage.details
        self._created = int(time.time())
        self._num_tokens = [0] * (len(prompts) * self._n)
        self._cached_tokens = [0] * len(self._num_tokens)
        # Told of every generated token before its part is sent.
        self.on_tokens: Callable[[int], object] | None = None

    @abstractmethod
    def parts(self, delta: ChoiceDelta) -> list[Part]:
        """Pieces to show, in order; none when the delta shows nothing yet."""

    @abstractmethod
    def chunk_choice(self, part: Part) -> dict[str, Any]: ...

    @abstractmethod
    def whole_choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]: ...

    async def whole(self, generation: AsyncIterable[ChoiceDelta]) -> dict[str, Any]:
        """Raises ApiError."""
        parts: list[list[Part]] = [[] for _ in self._num_tokens]
        async for delta in generation:
            parts[delta.index] += self._count(delta)
        choices = [self.whole_choice(index, each) for index, each in enumerate(parts)]
        return self._frame(self.kind, choices) | {"usage": self.usage()}

    async def events(self, generation: AsyncIterable[ChoiceDelta]) -> AsyncIterator[bytes]:
        """Server-sent events. An error after the headers is an event of its own, then [DONE]."""
        try:
            async for delta in generation:
                for part in self._count(delta):
                    chunk = self._frame(self.chunk_kind, [self.chunk_choice(part)])
                    yield _event(
                        chunk | {"usage": self.usage()} if self._continuous_usage else chunk
                    )
            if self._include_usage:
                yield _event(self._frame(self.chunk_kind, []) | {"usage": self.usage()})
        except ApiError as error:
            yield _event(error.document())
        except Exception:
            # The status is sent already, and a stream without an end is the worst answer.
            log.exception("a stream failed")
            yield _event(ApiError(500, SERVER_FAILED).document())
        yield DONE

    def usage(self) -> dict[str, Any]:
        """Each prompt counts once, whatever n is: its cached tokens are those that the first of
        its choices found."""
        completion_tokens = sum(self._num_tokens)
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
        }
        if self._details:
            cached_tokens = sum(self._cached_tokens[:: self._n])
            usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
        return usage

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self._prompts)

    def _count(self, delta: ChoiceDelta) -> list[Part]:
        if self.on_tokens is not None:
            self.on_tokens(delta.num_tokens - self._num_tokens[delta.index])
        self._num_tokens[delta.index] = delta.num_tokens
        self._cached_tokens[delta.index] = delta.num_cached_tokens
        return self.parts(delta)

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._answer_id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


class ChatAnswer(Answer):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, request: ChatRequest, **context: Any) -> None:
        super().__init__(request, **context)
        self._logprobs = bool(request.logprobs)
        self._opened: set[int] = set()

    def parts(self, delta: ChoiceDelta) -> list[Part]:
        parts = []
        logprobs = chat_logprobs(delta.logprobs, self._token_text) if self._logprobs else None
        if delta.text or logprobs:
            parts.append(Part(delta.index, delta.text, logprobs))
        if delta.finish_reason is not None:
            parts.append(
                Part(
                    delta.index,
                    finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason,
                )
            )
        if parts and delta.index not in self._opened:
            self._opened.add(delta.index)
            parts.insert(0, Part(delta.index, opening=True))
        return parts

    def chunk_choice(self, part: Part) -> dict[str, Any]:
        message: dict[str, Any] = {"content": part.text}
        if part.finish_reason is not None:
            message = {}
        elif part.opening:
            message = {"role": "assistant", "content": ""}
        return {
            "index": part.index,
            "delta": message,
            "logprobs": None if part.logprobs is None else {"content": part.logprobs},
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }

    def whole_choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        content = [token for part in parts for token in part.logprobs or ()]
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(part.text for part in parts)},
            "logprobs": {"content": content} if self._logprobs else None,
            "finish_reason": parts[-1].finish_reason,
            "stop_reason": parts[-1].stop_reason,
        }


class CompletionAnswer(Answer):
    """With ``echo`` a choice begins with its prompt, once its log-probabilities are known."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, request: CompletionRequest, **context: Any) -> None:
        super().__init__(request, **context)
        self._wants_logprobs = request.logprobs is not None
        self._logprobs = [CompletionLogprobs(self._token_text) for _ in self._num_tokens]
        self._unechoed = set(range(len(self._num_tokens))) if request.echo else set()
        self._prompt_entries: list[list[tuple[TokenLogprob, ...]]] = [[] for _ in self._num_tokens]

    def parts(self, delta: ChoiceDelta) -> list[Part]:
        index, parts = delta.index, []
        self._prompt_entries[index] += delta.prompt_logprobs
        if index in self._unechoed and (delta.num_tokens or delta.finish_reason):
            self._unechoed.remove(index)
            parts.append(self._echo(index))
        logprobs = None
        if self._wants_logprobs and delta.logprobs:
            logprobs = self._logprobs[index].output(delta.logprobs)
        if delta.text or logprobs:
            parts.append(Part(index, delta.text, logprobs))
        if delta.finish_reason is not None:
            parts.append(
                Part(index, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
            )
        return parts

    def chunk_choice(self, part: Part) -> dict[str, Any]:
        return {
            "index": part.index,
            "text": part.text,
            "logprobs": part.logprobs,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }

    def whole_choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        logprobs = self._logprobs[index].output(()) if self._wants_logprobs else None
        for part in parts:
            if logprobs is not None and part.logprobs is not None:
                extend_logprobs(logprobs, part.logprobs)
        return {
            "index": index,
            "text": "".join(part.text for part in parts),
            "logprobs": logprobs,
            "finish_reason": parts[-1].finish_reason,
            "stop_reason": parts[-1].stop_reason,
        }

    def _echo(self, index: int) -> Part:
        prompt = self._prompts[index // self._n]
        if not self._wants_logprobs:
            return Part(index, prompt.text)
        entries = self._prompt_entries[index]
        return Part(index, prompt.text, self._logprobs[index].prompt(prompt.token_ids, entries))


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"
