"""Chat and text completions: from a request's body to its answer.

Each endpoint takes the same steps: read and validate the body, make token ids, build sampling
parameters, submit, answer whole or as a stream. What is wrong with a request is found before
anything is submitted.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field

from starlette.requests import Request as HttpRequest

from plimsoll_engine.core import EngineCore
from plimsoll_engine.metrics import EngineMetrics
from plimsoll_engine.sampling_params import Grammar, SamplingParams
from plimsoll_engine.server.answer_types import Chat, Completion
from plimsoll_engine.server.answers import (
    USAGE_AS_ASKED,
    Answer,
    ChatAnswer,
    CompletionAnswer,
    UsageShown,
    Whole,
)
from plimsoll_engine.server.api_keys import KeyUse
from plimsoll_engine.server.body import BodyBounds, receive_body
from plimsoll_engine.server.errors import ApiError, invalid_value, shorten
from plimsoll_engine.server.generation import Generation
from plimsoll_engine.server.grammars import GrammarReader
from plimsoll_engine.server.protocol import (
    MAX_BODY_PARTS,
    Body,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    TokenizeRequest,
    parse_request,
)
from plimsoll_engine.server.streaming import EventStream, until_disconnect
from plimsoll_engine.server.text import Prompt, TextCodec, as_template_message
from plimsoll_engine.server.truncation import Truncation, read_truncation
from plimsoll_engine.server.validation import (
    LogprobsWanted,
    SamplingDefaults,
    build_sampling_params,
    check_characters,
    check_output_logprobs,
    check_prompt_logprobs,
    check_template_kwargs,
    check_vocabulary,
    read_prompt_logprobs,
    read_prompts,
)

# The OpenAI API's default for text completions.
DEFAULT_COMPLETION_TOKENS = 16
BODY_BOUNDS = BodyBounds()
# A body of up to so many bytes is read in the time that handing it to a thread takes.
SMALL_BODY_BYTES = 16 << 10


@dataclass(frozen=True)
class ServedModel:
    """``names`` are all that requests may use; the first is the one that answers carry."""

    names: tuple[str, ...]
    # Folder, file or hub name it was loaded from.
    root: str
    vocab_size: int
    # Longest request ever accepted, in tokens.
    ceiling: int
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    created: int = field(default_factory=lambda: int(time.time()))


class Service:
    """``max_sequences`` bounds prompts times choices of one request."""

    def __init__(
        self,
        core: EngineCore,
        codec: TextCodec,
        metrics: EngineMetrics,
        model: ServedModel,
        grammars: GrammarReader,
        *,
        max_sequences: int,
        usage: UsageShown = USAGE_AS_ASKED,
        body_bounds: BodyBounds = BODY_BOUNDS,
    ) -> None:
        self._body_bounds = body_bounds
        self.core = core
        self.codec = codec
        self.metrics = metrics
        self.model = model
        self._grammars = grammars
        self._max_sequences = max_sequences
        self._usage = usage
        # Generating requests between their first and last byte.
        self.load = 0
        # Set at SIGTERM: probes fail, so that nobody sends more.
        self.terminating = False

    async def complete(
        self, http: HttpRequest, request: CompletionRequest
    ) -> Completion | EventStream:
        arrival_time = http.scope["arrival_time"]
        prompt_logprobs = read_prompt_logprobs(request)
        if request.max_tokens == 0 and not request.echo and prompt_logprobs is None:
            raise invalid_value(
                "max_tokens", 0, "at least 1, or 0 together with echo: true or prompt_logprobs"
            )
        truncation = self._truncation(request, request.max_tokens, DEFAULT_COMPLETION_TOKENS)
        prompts = await self._read_prompts(request, truncation)
        positions = sum(len(prompt.token_ids) for prompt in prompts)
        logprobs = LogprobsWanted(
            request.logprobs, check_prompt_logprobs(positions, prompt_logprobs, request.n or 1)
        )
        grammar = await self._grammars.read(request)
        sequences = []
        for prompt in prompts:
            max_tokens = request.max_tokens
            if max_tokens is None:
                max_tokens = min(DEFAULT_COMPLETION_TOKENS, self._room(prompt))
            params = self._sampling_params(request, max_tokens, logprobs, grammar)
            sequences += self._choices(prompt, params, request.n or 1)
        if not request.stream:
            longest = max(params.max_tokens for _, params in sequences)
            check_output_logprobs("logprobs", logprobs.output, longest, len(sequences))
        answer = CompletionAnswer(
            request,
            answer_id=_answer_id("cmpl", http, request),
            model=request.model or self.model.names[0],
            prompts=prompts,
            token_text=self.codec.token_text,
            usage=self._usage,
        )
        return await self._answer(http, request, answer, sequences, arrival_time)

    async def chat(self, http: HttpRequest, request: ChatRequest) -> Chat | EventStream:
        arrival_time = http.scope["arrival_time"]
        max_tokens = request.max_completion_tokens
        field_name = "max_completion_tokens"
        if max_tokens is None:
            max_tokens, field_name = request.max_tokens, "max_tokens"
        if max_tokens == 0:
            raise invalid_value(field_name, 0, "at least 1")
        if request.top_logprobs and not request.logprobs:
            raise invalid_value("top_logprobs", request.top_logprobs, "logprobs: true beside it")
        prompt = await self.encode_chat(
            request,
            add_special_tokens=request.add_special_tokens,
            truncation=self._truncation(request, max_tokens, 1),
        )
        logprobs = LogprobsWanted(
            (request.top_logprobs or 0) if request.logprobs else None,
            check_prompt_logprobs(len(prompt.token_ids), read_prompt_logprobs(request), 1),
        )
        if max_tokens is None:
            max_tokens = self._room(prompt)
        if not request.stream:
            check_output_logprobs("top_logprobs", logprobs.output, max_tokens, request.n or 1)
        grammar = await self._grammars.read(request)
        params = self._sampling_params(request, max_tokens, logprobs, grammar)
        answer = ChatAnswer(
            request,
            answer_id=_answer_id("chatcmpl", http, request),
            model=request.model or self.model.names[0],
            prompts=[prompt],
            token_text=self.codec.token_text,
            usage=self._usage,
        )
        first, *others = self._choices(prompt, params, request.n or 1)
        # They are told once, beside the choices.
        others = [(ids, dataclasses.replace(own, prompt_logprobs=None)) for ids, own in others]
        return await self._answer(http, request, answer, [first, *others], arrival_time)

    async def read(self, http: HttpRequest, kind: type[Body]) -> Body:
        """The body as a request for this model. Raises ApiError: 400, 404, 408, 413 or 415."""
        body = await receive_body(http, self._body_bounds)
        if len(body) <= SMALL_BODY_BYTES:
            request = parse_request(body, kind)
        else:
            request = await self.codec.off_loop(parse_request, body, kind)
        name = getattr(request, "model", None)
        if name is not None and name not in self.model.names:
            raise ApiError(404, f"The model `{shorten(name)}` does not exist.", param="model")
        return request

    async def encode_text(
        self,
        text: str,
        *,
        add_special_tokens: bool | None,
        truncation: Truncation | None = None,
    ) -> Prompt:
        """Raises ApiError(400) for a text without tokens, or with far too many."""
        prompt = await self.codec.off_loop(
            self.codec.encode,
            self._fit_text(text, truncation),
            add_special_tokens=add_special_tokens is not False,
            truncation=truncation,
        )
        if not prompt.token_ids:
            raise invalid_value("prompt", text, "a prompt of at least one token")
        check_vocabulary("prompt", prompt.token_ids, self.model.vocab_size)
        return prompt

    async def encode_chat(
        self,
        request: ChatRequest | TokenizeRequest,
        *,
        add_special_tokens: bool | None = None,
        truncation: Truncation | None = None,
    ) -> Prompt:
        """Raises ApiError(400)."""
        # The template writes the begin token itself.
        prompt = await self.codec.off_loop(
            self._encode_chat, request, bool(add_special_tokens), truncation
        )
        if not prompt.token_ids:
            raise invalid_value("messages", "", "messages of at least one token")
        check_vocabulary("messages", prompt.token_ids, self.model.vocab_size)
        return prompt

    def _encode_chat(
        self,
        request: ChatRequest | TokenizeRequest,
        special: bool,
        truncation: Truncation | None,
    ) -> Prompt:
        """Everything that takes longer the longer the messages are. What a template makes of them
        may be longer than they are, so that both are measured."""
        check_template_kwargs(request.chat_template_kwargs)
        messages = [as_template_message(message) for message in request.messages or []]
        if truncation is None:
            self._check_characters(sum(len(text) for each in messages for text in each.values()))
        text = self.codec.render_chat(
            messages,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            template_kwargs=request.chat_template_kwargs,
        )
        return self.codec.encode(
            self._fit_text(text, truncation), add_special_tokens=special, truncation=truncation
        )

    def _truncation(
        self, request: GenerationRequest, max_tokens: int | None, default: int
    ) -> Truncation | None:
        output_tokens = default if max_tokens is None else max_tokens
        return read_truncation(request, ceiling=self.model.ceiling, output_tokens=output_tokens)

    def _fit_text(self, text: str, truncation: Truncation | None) -> str:
        """No more of it than can become tokens of a prompt. Raises ApiError(400)."""
        if truncation is None:
            self._check_characters(len(text))
            return text
        return truncation.cut_text(text, self.model.ceiling * self.codec.max_chars_per_token)

    async def _read_prompts(
        self, request: CompletionRequest, truncation: Truncation | None
    ) -> list[Prompt]:
        # Up to a million token ids are looked at.
        given = await self.codec.off_loop(
            read_prompts,
            request.prompt,
            vocab_size=self.model.vocab_size,
            longest=self.model.ceiling if truncation is None else MAX_BODY_PARTS,
        )
        n = request.n or 1
        if len(given) * n > self._max_sequences:
            raise invalid_value(
                "n" if len(given) == 1 else "prompt",
                n if len(given) == 1 else len(given),
                f"at most {self._max_sequences} prompts times n in one request (this one has "
                f"{len(given)} times {n})",
            )
        prompts = []
        for each in given:
            if isinstance(each, str):
                prompts.append(
                    await self.encode_text(
                        each,
                        add_special_tokens=request.add_special_tokens,
                        truncation=truncation,
                    )
                )
            else:
                kept = each if truncation is None else truncation.cut(each)
                prompts.append(await self.codec.off_loop(self.codec.show, kept))
        return prompts

    def _sampling_params(
        self,
        request: GenerationRequest,
        max_tokens: int,
        logprobs: LogprobsWanted,
        grammar: Grammar | None,
    ) -> SamplingParams:
        return build_sampling_params(
            request,
            max_tokens=max_tokens,
            logprobs=logprobs,
            defaults=self.model.defaults,
            vocab_size=self.model.vocab_size,
            grammar=grammar,
        )

    def _choices(
        self, prompt: Prompt, params: SamplingParams, n: int
    ) -> list[tuple[tuple[int, ...], SamplingParams]]:
        """With a seed, each choice gets one of its own, or all would be the same."""
        return [
            (
                prompt.token_ids,
                params
                if params.seed is None or n == 1
                else dataclasses.replace(params, seed=params.seed + choice),
            )
            for choice in range(n)
        ]

    def _room(self, prompt: Prompt) -> int:
        """Output tokens that are admitted now behind ``prompt``; at least 1, so that a prompt
        that is too long is refused by admission, in its words."""
        admitted = self.core.snapshot().largest_prompt_admissible + 1
        return max(1, admitted - len(prompt.token_ids))

    def _check_characters(self, num_characters: int) -> None:
        check_characters(
            num_characters,
            ceiling=self.model.ceiling,
            max_chars_per_token=self.codec.max_chars_per_token,
        )

    async def _answer(
        self,
        http: HttpRequest,
        request: GenerationRequest,
        answer: Answer[Whole],
        sequences: list[tuple[tuple[int, ...], SamplingParams]],
        arrival_time: float,
    ) -> Whole | EventStream:
        generation = Generation(
            self.core,
            self.codec,
            sequences,
            arrival_time=arrival_time,
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
        )
        self.metrics.request_params_n(request.n or 1)
        async with AsyncExitStack() as stack:
            stack.enter_context(self._counted())
            await stack.enter_async_context(generation)
            use: KeyUse | None = http.scope.get("key_use")
            if use is not None:
                use.prompt_tokens.inc(answer.prompt_tokens)
                answer.on_tokens = use.generation_tokens.inc
            if request.stream:
                return EventStream(answer.events(generation), stack.pop_all())
            return await until_disconnect(http.receive, self._whole(request, answer, generation))

    async def _whole(
        self, request: GenerationRequest, answer: Answer[Whole], generation: Generation
    ) -> Whole:
        parts = await answer.collect(generation)
        # Up to a quarter of a million log-probabilities take their time.
        if request.prompt_logprobs is not None:
            return await self.codec.off_loop(answer.document, parts)
        return answer.document(parts)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.load += 1
        try:
            yield
        finally:
            self.load -= 1


def _answer_id(prefix: str, http: HttpRequest, request: GenerationRequest) -> str:
    return f"{prefix}-{request.request_id or http.scope['request_id']}"
