"""What the API answers, as types: the JSON that is sent is encoded from these, and the OpenAPI
document is derived from them, so that the two cannot differ.

Field names and shapes are the OpenAI API's with vLLM's additions. A field that is UNSET is left out;
None is sent as null.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from plimsoll_engine.reports import FinishReason

Count = Annotated[int, Meta(ge=0)]


class ErrorDetail(Struct, kw_only=True):
    message: str
    type: str
    # The offending field, when there is one.
    param: str | None
    code: int


class Error(Struct):
    error: ErrorDetail


class ModelPermission(Struct, kw_only=True):
    """The same for every model: whoever may ask may do what is served here."""

    id: str
    created: Count
    object: Literal["model_permission"] = "model_permission"
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: None = None
    is_blocking: bool = False


class ModelCard(Struct, kw_only=True):
    id: str
    created: Count
    root: str
    max_model_len: Count
    permission: list[ModelPermission]
    object: Literal["model"] = "model"
    owned_by: str = "plimsoll"
    parent: None = None


class ModelList(Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class Tokens(Struct, kw_only=True):
    count: Count
    max_model_len: Count
    tokens: tuple[int, ...]
    token_strs: list[str] | None


class Text(Struct):
    prompt: str


class ServerLoad(Struct):
    server_load: Count


class Version(Struct):
    version: str


class PromptTokensDetails(Struct):
    cached_tokens: Count


class Usage(Struct, kw_only=True):
    prompt_tokens: Count
    total_tokens: Count
    completion_tokens: Count
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


class PromptLogprob(Struct):
    logprob: float
    # 1 is the most likely token.
    rank: int
    decoded_token: str


# By token id, for each token of the prompt; null for the first, which nothing precedes.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class TextLogprobs(Struct):
    """Four lists side by side, one entry for each token."""

    text_offset: list[Count]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TextChoice(Struct, kw_only=True):
    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    # Absent in the chunks of a stream.
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class Completion(Struct, kw_only=True):
    id: str
    created: Count
    model: str
    choices: list[TextChoice]
    object: Literal["text_completion"] = "text_completion"
    # Absent in the chunks of a stream, but where it was asked for.
    usage: Usage | UnsetType = UNSET


class TokenCandidate(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenCandidate]


class ChatLogprobs(Struct):
    content: list[ChatToken]


class Message(Struct):
    content: str
    role: Literal["assistant"] = "assistant"


class ChatChoice(Struct, kw_only=True):
    index: Count
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class Chat(Struct, kw_only=True):
    id: str
    created: Count
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None
    object: Literal["chat.completion"] = "chat.completion"


class Delta(Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    index: Count
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class ChatChunk(Struct, kw_only=True):
    id: str
    created: Count
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | UnsetType = UNSET
