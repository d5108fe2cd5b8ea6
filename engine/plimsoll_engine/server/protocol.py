"""Request bodies as values: JSON in, a typed request or an HTTP 400 out.

Field names, defaults and ranges are the OpenAI API's with vLLM's additions. A field we do not know
is ignored, as vLLM does; one we know and cannot honour is refused, because ignoring it would give
a wrong answer. What only the loaded model can judge (token ids, lengths) is in ``validation``.
"""

from __future__ import annotations

import re
from collections.abc import Sized
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from plimsoll_engine.server.errors import ApiError, invalid_value

Body = TypeVar("Body", bound=msgspec.Struct)
Probability = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
MAX_CHOICES = 128
MAX_LOGPROBS = 20
# Log-probabilities of prompts that one request may ask for, at about 200 bytes of host memory each:
# positions times (logprobs + 1) times n.
MAX_PROMPT_LOGPROBS = 1 << 18
# Log-probabilities that an answer may hold until it is whole, at the same price each.
MAX_OUTPUT_LOGPROBS = 1 << 20
# Entries of stop_token_ids and of logit_bias.
MAX_TOKEN_ENTRIES = 1024
MAX_STOP_STRINGS = 64
# Far beyond any use, and far from where float32 logits overflow or vanish.
MAX_TEMPERATURE = 100
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100
MAX_STOP_LENGTH = 1024
# Of a chat, before its template runs: each message costs time and memory whatever is in it, and
# a role and a name are words.
MAX_MESSAGES = 8192
MAX_NAME_LENGTH = 256
MAX_TEMPLATE_KWARGS_BYTES = 64 << 10
# Commas and opening brackets of a body, wherever they stand: a million token ids, or their like.
MAX_BODY_PARTS = 1 << 20


# Of a prompt that is cut: what goes.
Side = Annotated[str, Meta(pattern="^(left|right)$")]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
# One text, one list of token ids, or a list of either.
PromptGiven = str | Annotated[list[str | int | list[int]], Meta(min_length=1)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What chat and text completions share. ``None`` is the default of the model or the API."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Probability | None = None
    # 0 and -1 switch it off, as in vLLM.
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: (
        Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None
    ) = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_TOKEN_ENTRIES)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_TOKEN_ENTRIES)] | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)] | None = None
    request_id: Annotated[str, Meta(max_length=MAX_NAME_LENGTH)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    # Streams do not tell them; 0 asks for nothing there, as in vLLM.
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    # Read by ``truncation``.
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation_side: Side | None = None
    # How the output must look: read by ``structured``.
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    # Refused, but for the values in REFUSED_FIELDS.
    tools: Any = None
    functions: Any = None
    suffix: Any = None
    use_beam_search: Any = None
    best_of: Any = None
    prompt_embeds: Any = None
    chat_template: Any = None

    @property
    def include_usage(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.continuous_usage_stats)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        given = self.stop or ()
        return (given,) if isinstance(given, str) else tuple(given)


class CompletionRequest(GenerationRequest, kw_only=True):
    # Lists are looked at by ``validation``: no type says that a list is of one kind.
    prompt: PromptGiven | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
    # Text, or parts of type text.
    content: str | list[dict[str, Any]] | None = None
    name: Annotated[str, Meta(max_length=MAX_NAME_LENGTH)] | None = None


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ChatRequest(GenerationRequest, kw_only=True):
    messages: Messages
    max_completion_tokens: Annotated[int, Meta(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


# Fields that change the answer and that this engine cannot honour, with the values under which
# they change nothing. ``None`` always counts as not given.
REFUSED_FIELDS: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "suffix": ("",),
    "use_beam_search": (False,),
    "best_of": (1,),
    "prompt_embeds": (),
    "chat_template": (),
}


def parse_request(body: bytes, kind: type[Body]) -> Body:
    """Takes up to a quarter of a second for a body at its bounds: not for the event loop.

    Raises ApiError(400), which names the field, its value and what is allowed, or 413.
    """
    _check_parts(body)
    try:
        # Strictly: msgspec does not look into the fields that it skips.
        body.decode()
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explain(error, body) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid_json(error) from None
    if isinstance(request, GenerationRequest):
        _refuse_unsupported(request)
        _check_stream_options(request)
        _check_streamed_prompt(request)
    return request


def _check_parts(body: bytes) -> None:
    """Each list, object and value costs memory and holds up all other threads while it is read,
    many times more than the bytes of a text do. So they are bounded before anything is made of
    them; to tell them from commas in texts would take longer than it is worth."""
    parts = body.count(b",") + body.count(b"[") + body.count(b"{")
    if parts > MAX_BODY_PARTS:
        raise ApiError(
            413,
            f"The body has {parts} commas and opening brackets; expected at most {MAX_BODY_PARTS}",
        )


def _invalid_json(error: Exception) -> ApiError:
    return ApiError(400, f"The body is not valid JSON: {error}")


def _refuse_unsupported(request: GenerationRequest) -> None:
    for name, harmless in REFUSED_FIELDS.items():
        value = getattr(request, name)
        if value is not None and value not in harmless:
            raise invalid_value(name, value, "it to be absent: this engine does not support it")


def _check_stream_options(request: GenerationRequest) -> None:
    """Empty options ask for nothing, and pass as they do in vLLM."""
    options = request.stream_options
    if options not in (None, StreamOptions()) and not request.stream:
        raise invalid_value("stream_options", options, "it only together with stream: true")


def _check_streamed_prompt(request: GenerationRequest) -> None:
    if request.stream and request.prompt_logprobs:
        raise invalid_value(
            "prompt_logprobs", request.prompt_logprobs, "it to be absent with stream: true"
        )


def _explain(error: msgspec.ValidationError, body: bytes) -> ApiError:
    """msgspec says what was expected and where (``... - at `$.n` ``); add the value found."""
    try:
        document = msgspec.json.decode(body)
    # Malformed behind the place of the first error.
    except msgspec.DecodeError as malformed:
        return _invalid_json(malformed)
    if not isinstance(document, dict):
        return ApiError(400, "The body must be a JSON object")
    text, _, place = str(error).partition(" - at ")
    path = place.strip("`").removeprefix("$").removeprefix(".")
    missing = re.fullmatch(r"Object missing required field `(.+)`", text)
    if missing:
        field = f"{path}.{missing[1]}" if path else missing[1]
        return ApiError(400, f"{field}: a required field is missing", param=missing[1])
    allowed = text.removeprefix("Expected ").replace("`", "").partition(", got ")[0]
    value = _value_at(document, path)
    if "length" in allowed and isinstance(value, Sized):
        allowed += f" (this has {len(value)})"
    return invalid_value(path or "body", value, allowed)


def _value_at(document: object, path: str) -> object:
    """The value under ``messages[0].role``, or what holds it where msgspec's path is vague."""
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        if index and isinstance(document, list):
            document = document[int(index)]
        elif name and isinstance(document, dict) and name in document:
            document = document[name]
        else:
            break
    return document
