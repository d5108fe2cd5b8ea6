"""A request's body -> what it demands: sequences, prompts to be counted, output tokens.

In: the JSON of a completion or a chat in vLLM's form. Out: a Demand, or an ApiError that names the
field. Only what the admission needs is read; the rest is vLLM's to check. What vLLM might read in
another way (numbers as texts, another encoding) is refused, so that nothing passes uncounted.

A bound on a prompt's tokens comes from its bytes: a token of a byte-level or byte-fallback
tokenizer covers at least one. Unicode normalisation may lengthen a text (NFKC by at most 11 times),
so only ASCII counts as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from plimsoll_engine.server.errors import ApiError, invalid_value

# vLLM's default for completions.
DEFAULT_COMPLETION_TOKENS = 16
NFKC_GROWTH = 11
# Of a bound: tokens that a tokenizer adds to a text, and what a chat template may add to a chat and
# to each message, generously (Llama 3.1 adds some 40 and 5, Qwen 3 some 20 and 5).
SPECIAL_TOKENS = 8
TEMPLATE_TOKENS = 512
MESSAGE_TOKENS = 32

Count = Annotated[int, Meta(ge=0)]
_BOUNDED_KEYS = frozenset({"role", "content", "name"})
# What /tokenize takes of a chat, under the same names.
_RENDERING = (
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "tools",
)


@dataclass(frozen=True)
class Prompt:
    """Exactly one of ``tokens`` (given as ids) and ``question`` (for /tokenize) is not None."""

    tokens: int | None
    question: dict[str, Any] | None = None
    # At most so many tokens; None: unknown.
    bound: int | None = None


@dataclass(frozen=True)
class Demand:
    """``max_tokens`` None: as many as there is room for."""

    prompts: tuple[Prompt, ...]
    # Sequences of each prompt.
    choices: int
    max_tokens: int | None
    # The prompt is cut to its last so many tokens.
    truncated_to: int | None

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.choices


class _Generation(msgspec.Struct):
    model: str | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: Count | UnsetType | None = UNSET
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    prompt_embeds: Any = None
    best_of: Annotated[int, Meta(ge=1)] | None = None


class _Completion(_Generation):
    prompt: Any = None
    add_special_tokens: bool = True


class _Chat(_Generation):
    messages: list[dict[str, Any]] = []
    max_completion_tokens: Count | None = None
    add_generation_prompt: Any = UNSET
    continue_final_message: Any = UNSET
    add_special_tokens: Any = UNSET
    chat_template: Any = UNSET
    chat_template_kwargs: Any = UNSET
    mm_processor_kwargs: Any = UNSET
    tools: Any = UNSET
    documents: Any = UNSET
    reasoning_effort: Any = UNSET


def read_completion(body: bytes) -> Demand:
    """Raises ApiError."""
    given = _decode(body, _Completion)
    max_tokens = DEFAULT_COMPLETION_TOKENS if given.max_tokens is UNSET else given.max_tokens
    prompts = tuple(_completion_prompt(given, each) for each in _split(given.prompt))
    return _demand(given, prompts, max_tokens)


def read_chat(body: bytes) -> Demand:
    """Raises ApiError."""
    given = _decode(body, _Chat)
    max_tokens = given.max_completion_tokens
    if max_tokens is None and given.max_tokens is not UNSET:
        max_tokens = given.max_tokens
    question: dict[str, Any] = {"model": given.model, "messages": given.messages}
    question |= {name: value for name in _RENDERING if (value := getattr(given, name)) is not UNSET}
    if given.reasoning_effort not in (UNSET, None) or given.documents not in (UNSET, None):
        # vLLM hands both to the template, and /tokenize has no field of its own for them.
        extra = {"reasoning_effort": given.reasoning_effort, "documents": given.documents}
        kwargs = question.get("chat_template_kwargs") or {}
        if not isinstance(kwargs, dict):
            raise invalid_value("chat_template_kwargs", kwargs, "an object")
        question["chat_template_kwargs"] = {
            key: value for key, value in extra.items() if value not in (UNSET, None)
        } | kwargs
    return _demand(given, (Prompt(None, question, _bound_chat(given)),), max_tokens)


def limit_output(body: bytes, max_tokens: int, *, chat: bool) -> bytes:
    """The body with a limit of output that it lacked; everything else of it as it was."""
    name = "max_completion_tokens" if chat else "max_tokens"
    fields: dict[str, msgspec.Raw] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields[name] = msgspec.Raw(str(max_tokens).encode())
    return msgspec.json.encode(fields)


def bound_text(text: str) -> int:
    """Tokens that ``text`` has at most, without special ones."""
    return len(text) if text.isascii() else NFKC_GROWTH * len(text.encode())


def _decode(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"The request is not allowed: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The request body is not JSON: {error}") from None


def _demand(given: _Generation, prompts: tuple[Prompt, ...], max_tokens: int | None) -> Demand:
    if given.prompt_embeds is not None:
        raise invalid_value("prompt_embeds", "...", "a prompt in text or token ids")
    truncated = given.truncate_prompt_tokens
    return Demand(
        prompts,
        choices=max(given.n or 1, given.best_of or 1),
        max_tokens=max_tokens,
        truncated_to=truncated if truncated is not None and truncated > 0 else None,
    )


def _split(prompt: Any) -> list[Any]:
    """A text, token ids, or a list of either, as a list of prompts."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        return [prompt] if _are_ids(prompt) else prompt
    raise invalid_value("prompt", prompt, "a text, token ids, or a list of either, not empty")


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _completion_prompt(given: _Completion, prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        question = {
            "model": given.model,
            "prompt": prompt,
            "add_special_tokens": given.add_special_tokens,
        }
        try:
            return Prompt(None, question, bound_text(prompt) + SPECIAL_TOKENS)
        except UnicodeEncodeError:
            raise invalid_value("prompt", "...", "text that UTF-8 can carry") from None
    if _are_ids(prompt):
        return Prompt(len(prompt))
    raise invalid_value("prompt", prompt, "a text, token ids, or a list of either")


def _bound_chat(given: _Chat) -> int | None:
    """None for what a template may turn into more than its bytes: tools, images, arguments."""
    if any(
        getattr(given, name) not in (UNSET, None)
        for name in ("tools", "chat_template", "chat_template_kwargs", "documents")
    ):
        return None
    total = TEMPLATE_TOKENS + MESSAGE_TOKENS * len(given.messages)
    for message in given.messages:
        if not message.keys() <= _BOUNDED_KEYS:
            return None
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        texts = [message.get("role", ""), message.get("name") or ""]
        for part in parts:
            if not isinstance(part, dict) or part.get("type") != "text":
                return None
            texts.append(part.get("text") or "")
        for text in texts:
            if not isinstance(text, str):
                return None
            total += bound_text(text)
    return total
