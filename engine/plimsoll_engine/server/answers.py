"""Deltas of a generation -> an answer (``answer_types``), streamed or whole.

An answer cuts every delta into parts. A stream sends each part as a chunk; a whole answer joins
the very same parts. So both modes say the same, by construction.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET

from plimsoll_engine.executor import TokenLogprob
from plimsoll_engine.reports import FinishReason
from plimsoll_engine.server.answer_types import (
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    Completion,
    Delta,
    Message,
    PromptLogprobs,
    PromptTokensDetails,
    TextChoice,
    Usage,
)
from plimsoll_engine.server.errors import SERVER_FAILED, ApiError
from plimsoll_engine.server.generation import ChoiceDelta
from plimsoll_engine.server.logprobs import (
    CompletionLogprobs,
    TokenText,
    chat_logprobs,
    extend_logprobs,
    prompt_logprobs,
)
from plimsoll_engine.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from plimsoll_engine.server.text import Prompt

log = logging.getLogger(__name__)

Whole = TypeVar("Whole", Completion, Chat)

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


class Answer(ABC, Generic[Whole]):
    """Counts usage, and frames parts as chunks or as a whole."""

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
        self.answer_id = answer_id
        self.model = model
        self.created = int(time.time())
        self._prompts = prompts
        self._token_text = token_text
        self._n = request.n or 1
        self._include_usage = request.include_usage or usage.always
        self._continuous_usage = self._include_usage and request.continuous_usage
        self._details = usage.details
        self._num_tokens = [0] * (len(prompts) * self._n)
        self._cached_tokens = [0] * len(self._num_tokens)
        self._num_prompt_logprobs = request.prompt_logprobs
        self._prompt_entries: list[list[tuple[TokenLogprob, ...]]] = [[] for _ in self._num_tokens]
        # Told of every generated token before its part is sent.
        self.on_tokens: Callable[[int], object] | None = None

    @abstractmethod
    def parts(self, delta: ChoiceDelta) -> list[Part]:
        """Pieces to show, in order; none when the delta shows nothing yet."""

    @abstractmethod
    def chunk(self, part: Part | None) -> Completion | ChatChunk:
        """An event's document; None: the last one, of usage alone."""

    @abstractmethod
    def document(self, parts: Sequence[Sequence[Part]]) -> Whole:
        """The whole answer from the parts of each choice."""

    async def collect(self, generation: AsyncIterable[ChoiceDelta]) -> list[list[Part]]:
        """What ``document`` is made of. Raises ApiError."""
        parts: list[list[Part]] = [[] for _ in self._num_tokens]
        async for delta in generation:
            parts[delta.index] += self._count(delta)
        return parts

    async def events(self, generation: AsyncIterable[ChoiceDelta]) -> AsyncIterator[bytes]:
        """Server-sent events. An error after the headers is an event of its own, then [DONE]."""
        try:
            async for delta in generation:
                for part in self._count(delta):
                    chunk = self.chunk(part)
                    if self._continuous_usage:
                        chunk.usage = self.usage()
                    yield _event(chunk)
            if self._include_usage:
                chunk = self.chunk(None)
                chunk.usage = self.usage()
                yield _event(chunk)
        except ApiError as error:
            yield _event(error.document())
        except Exception:
            # The status is sent already, and a stream without an end is the worst answer.
            log.exception("a stream failed")
            yield _event(ApiError(500, SERVER_FAILED).document())
        yield DONE

    def usage(self) -> Usage:
        """Each prompt counts once, whatever n is: its cached tokens are those that the first of
        its choices found."""
        completion_tokens = sum(self._num_tokens)
        cached_tokens = sum(self._cached_tokens[:: self._n])
        return Usage(
            prompt_tokens=self.prompt_tokens,
            total_tokens=self.prompt_tokens + completion_tokens,
            completion_tokens=completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens) if self._details else UNSET,
        )

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self._prompts)

    def _count(self, delta: ChoiceDelta) -> list[Part]:
        if self.on_tokens is not None:
            self.on_tokens(delta.num_tokens - self._num_tokens[delta.index])
        self._num_tokens[delta.index] = delta.num_tokens
        self._cached_tokens[delta.index] = delta.num_cached_tokens
        self._prompt_entries[delta.index] += delta.prompt_logprobs
        return self.parts(delta)

    def _shown_prompt(self, index: int) -> PromptLogprobs | None:
        if self._num_prompt_logprobs is None:
            return None
        entries = self._prompt_entries[index]
        return prompt_logprobs(entries, self._num_prompt_logprobs, self._token_text)


class ChatAnswer(Answer[Chat]):
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

    def chunk(self, part: Part | None) -> ChatChunk:
        return ChatChunk(
            id=self.answer_id,
            created=self.created,
            model=self.model,
            choices=[] if part is None else [self._chunk_choice(part)],
        )

    def _chunk_choice(self, part: Part) -> ChatChunkChoice:
        delta = Delta(content=part.text)
        if part.finish_reason is not None:
            delta = Delta()
        elif part.opening:
            delta = Delta(role="assistant", content="")
        return ChatChunkChoice(
            index=part.index,
            delta=delta,
            logprobs=None if part.logprobs is None else ChatLogprobs(part.logprobs),
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
        )

    def document(self, parts: Sequence[Sequence[Part]]) -> Chat:
        return Chat(
            id=self.answer_id,
            created=self.created,
            model=self.model,
            choices=[self._choice(index, each) for index, each in enumerate(parts)],
            usage=self.usage(),
            prompt_logprobs=self._shown_prompt(0),
        )

    def _choice(self, index: int, parts: Sequence[Part]) -> ChatChoice:
        content = [token for part in parts for token in part.logprobs or ()]
        return ChatChoice(
            index=index,
            message=Message("".join(part.text for part in parts)),
            logprobs=ChatLogprobs(content) if self._logprobs else None,
            finish_reason=parts[-1].finish_reason,
            stop_reason=parts[-1].stop_reason,
        )


class CompletionAnswer(Answer[Completion]):
    """With ``echo`` a choice begins with its prompt, once its log-probabilities are known."""

    def __init__(self, request: CompletionRequest, **context: Any) -> None:
        super().__init__(request, **context)
        self._num_logprobs = request.logprobs
        self._logprobs = [CompletionLogprobs(self._token_text) for _ in self._num_tokens]
        self._unechoed = set(range(len(self._num_tokens))) if request.echo else set()

    def parts(self, delta: ChoiceDelta) -> list[Part]:
        index, parts = delta.index, []
        if index in self._unechoed and (delta.num_tokens or delta.finish_reason):
            self._unechoed.remove(index)
            parts.append(self._echo(index))
        logprobs = None
        if self._num_logprobs is not None and delta.logprobs:
            logprobs = self._logprobs[index].output(delta.logprobs)
        if delta.text or logprobs:
            parts.append(Part(index, delta.text, logprobs))
        if delta.finish_reason is not None:
            parts.append(
                Part(index, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
            )
        return parts

    def chunk(self, part: Part | None) -> Completion:
        choices = []
        if part is not None:
            choices = [
                TextChoice(
                    index=part.index,
                    text=part.text,
                    logprobs=part.logprobs,
                    finish_reason=part.finish_reason,
                    stop_reason=part.stop_reason,
                )
            ]
        return self._frame(choices)

    def document(self, parts: Sequence[Sequence[Part]]) -> Completion:
        answer = self._frame([self._choice(index, each) for index, each in enumerate(parts)])
        answer.usage = self.usage()
        return answer

    def _frame(self, choices: list[TextChoice]) -> Completion:
        return Completion(
            id=self.answer_id, created=self.created, model=self.model, choices=choices
        )

    def _choice(self, index: int, parts: Sequence[Part]) -> TextChoice:
        logprobs = None if self._num_logprobs is None else self._logprobs[index].output(())
        for part in parts:
            if logprobs is not None and part.logprobs is not None:
                extend_logprobs(logprobs, part.logprobs)
        return TextChoice(
            index=index,
            text="".join(part.text for part in parts),
            logprobs=logprobs,
            finish_reason=parts[-1].finish_reason,
            stop_reason=parts[-1].stop_reason,
            prompt_logprobs=self._shown_prompt(index),
        )

    def _echo(self, index: int) -> Part:
        prompt = self._prompts[index // self._n]
        if self._num_logprobs is None:
            return Part(index, prompt.text)
        # There may be more, for ``prompt_logprobs``.
        entries = [each[: 1 + self._num_logprobs] for each in self._prompt_entries[index]]
        return Part(index, prompt.text, self._logprobs[index].prompt(prompt.token_ids, entries))


def _event(document: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"
