"""A typed request plus what the loaded model allows -> sampling parameters, or an HTTP 400.

Everything that would hurt inside a step (a token id outside the logits, an impossible count) is
refused here, at the door. This module knows neither HTTP nor text: prompts are token ids already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from plimsoll_engine.sampling_params import Grammar, SamplingParams
from plimsoll_engine.server.errors import ApiError, invalid_value
from plimsoll_engine.server.protocol import (
    MAX_OUTPUT_LOGPROBS,
    MAX_PROMPT_LOGPROBS,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MAX_TEMPLATE_KWARGS_BYTES,
    MIN_REPETITION_PENALTY,
    CompletionRequest,
    GenerationRequest,
)

Value = TypeVar("Value")
MAX_DIGITS = 20
LEAST_TEMPERATURE = 0.01


@dataclass(frozen=True)
class SamplingDefaults:
    """The model's own wishes (generation_config), used where a request says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: frozenset[int] = frozenset()


def read_defaults(
    given: Mapping[str, float], eos_token_ids: frozenset[int], vocab_size: int
) -> SamplingDefaults:
    """``given`` is from generation_config.json, with the keys that are set there. A value that a
    request could not have either is passed over, and so is an end that the model cannot say."""
    allowed = {
        "temperature": lambda value: 0 <= value <= MAX_TEMPERATURE,
        "top_p": lambda value: 0 < value <= 1,
        "top_k": lambda value: 1 <= value < 1 << 31 and value == int(value),
        "min_p": lambda value: 0 <= value <= 1,
        "repetition_penalty": lambda value: (
            MIN_REPETITION_PENALTY <= value <= MAX_REPETITION_PENALTY
        ),
    }
    values: dict[str, Any] = {
        name: int(value) if name == "top_k" else float(value)
        for name, value in given.items()
        if name in allowed and allowed[name](value)
    }
    return SamplingDefaults(
        **values, eos_token_ids=frozenset(range(vocab_size)).intersection(eos_token_ids)
    )


@dataclass(frozen=True)
class LogprobsWanted:
    """Counts of alternatives per token; None: no log-probabilities at all."""

    output: int | None = None
    prompt: int | None = None


def build_sampling_params(
    request: GenerationRequest,
    *,
    max_tokens: int,
    logprobs: LogprobsWanted,
    defaults: SamplingDefaults,
    vocab_size: int,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """Raises ApiError(400). ``vocab_size`` is that of the logits (ModelLimits), not the
    tokenizer's."""
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid_value("min_tokens", min_tokens, f"at most max_tokens ({max_tokens})")
    stop_token_ids = request.stop_token_ids or []
    check_token_ids("stop_token_ids", stop_token_ids, vocab_size)
    top_k = _first(request.top_k, defaults.top_k)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=clamp_temperature(_first(request.temperature, defaults.temperature)),
        top_p=_first(request.top_p, defaults.top_p),
        top_k=top_k if top_k is not None and top_k > 0 else None,
        min_p=_first(request.min_p, defaults.min_p),
        presence_penalty=_first(request.presence_penalty, 0.0),
        frequency_penalty=_first(request.frequency_penalty, 0.0),
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty),
        seed=request.seed,
        min_tokens=min_tokens,
        ignore_eos=bool(request.ignore_eos),
        eos_token_ids=frozenset() if request.ignore_eos else defaults.eos_token_ids,
        stop_token_ids=frozenset(stop_token_ids),
        stop=request.stop_strings,
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        skip_special_tokens=_first(request.skip_special_tokens, True),
        logit_bias=_read_logit_bias(request.logit_bias or {}, vocab_size),
        logprobs=logprobs.output,
        prompt_logprobs=logprobs.prompt,
        grammar=grammar,
    )


def clamp_temperature(temperature: float) -> float:
    """0 is greedy; what is nearly so is raised to where nothing overflows, as vLLM does."""
    return temperature and max(temperature, LEAST_TEMPERATURE)


def check_token_ids(param: str, token_ids: Sequence[object], vocab_size: int) -> None:
    """Raises ApiError(400) for the first entry that is not an id of the model."""
    for position, token_id in enumerate(token_ids):
        # bool is an int to Python, but true is no token.
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise invalid_value(
                f"{param}[{position}]", token_id, f"a token id from 0 to {vocab_size - 1}"
            )


def check_vocabulary(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises ApiError(400), in vLLM's words, for ids that the tokenizer knows and the model has no
    embedding of: some models come with a tokenizer that is larger than they are."""
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise ApiError(
            400,
            f"Token id {largest} is out of vocabulary: {param} has text that the tokenizer makes "
            f"this id of, and the model's ids are 0 to {vocab_size - 1}",
            param=param,
        )


def read_prompts(prompt: object, *, vocab_size: int, longest: int) -> list[str | list[int]]:
    """The four forms of ``prompt`` as a list of texts and id lists, of at most ``longest`` ids each.
    Raises ApiError(400).

    A text may be empty here: whether it makes a token is the tokenizer's to say.
    """
    if isinstance(prompt, str):
        return [prompt]
    allowed = "a text, a list of texts, a list of token ids or a list of such lists, not empty"
    if not isinstance(prompt, list) or not prompt:
        raise invalid_value("prompt", prompt, allowed)
    if type(prompt[0]) is int:
        _check_prompt_ids("prompt", prompt, vocab_size, longest)
        return [prompt]
    for position, entry in enumerate(prompt):
        if isinstance(entry, list) and entry:
            _check_prompt_ids(f"prompt[{position}]", entry, vocab_size, longest)
        elif not isinstance(entry, str):
            raise invalid_value(f"prompt[{position}]", entry, allowed)
    return prompt


def _check_prompt_ids(
    param: str, token_ids: Sequence[object], vocab_size: int, longest: int
) -> None:
    if len(token_ids) > longest:
        raise ApiError(
            400,
            f"This model's maximum context length is {longest} tokens. However, your prompt "
            f"contains {len(token_ids)} input tokens. Please reduce the length of the input "
            "prompt.",
            param="input_tokens",
        )
    check_token_ids(param, token_ids, vocab_size)


def read_prompt_logprobs(request: GenerationRequest) -> tuple[str, int] | None:
    """How many of the most likely tokens are wanted beside each of the prompt's own, and the field
    that asks for the most; None: no log-probabilities of prompts."""
    wanted = []
    if request.prompt_logprobs is not None and not request.stream:
        wanted.append(("prompt_logprobs", request.prompt_logprobs))
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        wanted.append(("logprobs", request.logprobs))
    return max(wanted, key=lambda asked: asked[1], default=None)


def check_prompt_logprobs(positions: int, wanted: tuple[str, int] | None, n: int) -> int | None:
    """``wanted`` is read_prompt_logprobs'; its number. Raises ApiError(400) for more than host
    memory is meant to hold."""
    if wanted is None:
        return None
    param, logprobs = wanted
    entries = positions * (logprobs + 1) * n
    if entries > MAX_PROMPT_LOGPROBS:
        raise invalid_value(
            param,
            logprobs,
            f"at most {MAX_PROMPT_LOGPROBS} log-probabilities of prompts in one request; this one "
            f"asks for {entries}: {positions} prompt tokens x ({logprobs} + 1) x n {n}",
        )
    return logprobs


def check_output_logprobs(param: str, logprobs: int | None, max_tokens: int, choices: int) -> None:
    """Raises ApiError(400) for an answer that would hold more than host memory is meant to; None
    asks for none."""
    if logprobs is None:
        return
    entries = max_tokens * (logprobs + 1) * choices
    if entries > MAX_OUTPUT_LOGPROBS:
        raise invalid_value(
            param,
            logprobs,
            f"at most {MAX_OUTPUT_LOGPROBS} log-probabilities in an answer that is not streamed; "
            f"this one may have {entries}: {max_tokens} max_tokens x ({logprobs} + 1) x {choices} "
            "choices. Set a smaller max_tokens, or stream",
        )


def check_characters(num_characters: int, *, ceiling: int, max_chars_per_token: int) -> None:
    """Refuses, before any tokenizing, a text that is too long whatever its tokens are.

    Raises ApiError(400) in vLLM's words.
    """
    longest = ceiling * max_chars_per_token
    if num_characters > longest:
        raise ApiError(
            400,
            f"This model's maximum context length is {ceiling} tokens. However, your prompt has "
            f"{num_characters} characters, and {ceiling} tokens are {longest} characters at most. "
            "Please reduce the length of the input prompt.",
            param="input_text",
        )


def check_template_kwargs(given: Mapping[str, Any] | None) -> None:
    """Raises ApiError(400) for values that would take a template too long to walk through."""
    length = len(msgspec.json.encode(given or {}))
    if length > MAX_TEMPLATE_KWARGS_BYTES:
        raise invalid_value(
            "chat_template_kwargs",
            given,
            f"at most {MAX_TEMPLATE_KWARGS_BYTES} bytes of JSON (this is {length})",
        )


def _read_logit_bias(biases: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, bias in biases.items():
        # No id has so many digits, and Python reads no number of thousands.
        if not (
            key.isascii() and key.isdigit() and len(key) <= MAX_DIGITS and int(key) < vocab_size
        ):
            raise invalid_value(
                "logit_bias", key, f"keys that are token ids from 0 to {vocab_size - 1}"
            )
        if not -100 <= bias <= 100:
            raise invalid_value(f"logit_bias.{key}", bias, "a number from -100 to 100")
        pairs.append((int(key), bias))
    return tuple(pairs)


def _first(value: Value | None, default: Value) -> Value:
    return default if value is None else value
