"""Text to token ids and back, chat messages to a prompt: the tokenizer's work, off the event loop.

In: a transformers tokenizer with its chat template. Out: token ids, text. The slow parts run in a
small thread pool (encoding releases the GIL), so that a long prompt never delays ``/health``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from plimsoll_engine.server.errors import ApiError, invalid_value
from plimsoll_engine.server.protocol import ChatMessage
from plimsoll_engine.server.truncation import Truncation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
# The template's own variables, which a request must not replace.
RESERVED_TEMPLATE_NAMES = frozenset(
    {"conversation", "messages", "tokenize", "chat_template", "return_dict", "tokenizer_kwargs"}
    | {"add_generation_prompt", "continue_final_message", "return_tensors", "padding"}
    | {"truncation", "max_length", "return_assistant_tokens_mask"}
)


@dataclass(frozen=True)
class Prompt:
    """``text`` is what ``echo`` shows: the client's own, or token ids decoded, as of a prompt that
    was cut."""

    token_ids: tuple[int, ...]
    text: str


class TextCodec:
    """Safe to use from several threads: only the tokenizer's stateless core is called."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, workers: int = 2) -> None:
        self._tokenizer = tokenizer
        self._core = tokenizer.backend_tokenizer
        # tokenizer.json may ask for both; a prompt is never cut or filled up in silence.
        self._core.no_truncation()
        self._core.no_padding()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="tokenizer")
        # No text of more characters per token exists, whatever it says.
        self.max_chars_per_token = max(map(len, self._core.get_vocab()), default=1)

    async def off_loop(
        self,
        work: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Runs one of the methods below in the pool."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: work(*args, **kwargs))

    def encode(
        self, text: str, *, add_special_tokens: bool = True, truncation: Truncation | None = None
    ) -> Prompt:
        """A text may give no token at all: an empty one does, unless a begin token is added."""
        if truncation is not None:
            return self.show(self._encode_cut(text, add_special_tokens, truncation))
        encoding = self._core.encode(text, add_special_tokens=add_special_tokens)
        return Prompt(tuple(encoding.ids), text)

    def _encode_cut(self, text: str, special: bool, truncation: Truncation) -> list[int]:
        """What the tokenizer adds by itself stays, as with transformers' own truncation."""
        added = self._core.num_special_tokens_to_add(False) if special else 0
        encoding = self._core.encode(text, add_special_tokens=False)
        encoding.truncate(max(0, truncation.length - added), direction=truncation.side)
        return self._core.post_process(encoding, add_special_tokens=special).ids

    def show(self, token_ids: Sequence[int]) -> Prompt:
        return Prompt(tuple(token_ids), self.decode(token_ids, skip_special_tokens=False))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._core.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token by itself, special tokens as they are written."""
        return self._core.decode([token_id], skip_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """``messages`` are as_template_message's. Raises ApiError(400) for what the model's chat
        template refuses."""
        if self._tokenizer.chat_template is None:
            raise ApiError(
                400,
                "This model has no chat template, so it cannot take messages; "
                "use /v1/completions with a prompt",
                param="messages",
            )
        if add_generation_prompt and continue_final_message:
            raise invalid_value(
                "continue_final_message", True, "add_generation_prompt: false beside it"
            )
        reserved = RESERVED_TEMPLATE_NAMES.intersection(template_kwargs or {})
        if reserved:
            raise invalid_value(
                "chat_template_kwargs", min(reserved), "names that the server does not set itself"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(template_kwargs or {}),
            )
        # A template is a program that runs over the client's values, and raises whatever it likes.
        except Exception as error:
            raise ApiError(
                400, f"messages: the chat template refuses them: {error}", param="messages"
            ) from error
        return str(text)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def as_template_message(message: ChatMessage) -> dict[str, str]:
    """Text parts are joined by line ends; any other part is refused with ApiError(400)."""
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise invalid_value(
                    "messages[].content", part, 'parts of the form {"type": "text", "text": "..."}'
                )
        content = "\n".join(part["text"] for part in content)
    document = {"role": message.role, "content": content or ""}
    if message.name is not None:
        document["name"] = message.name
    return document
