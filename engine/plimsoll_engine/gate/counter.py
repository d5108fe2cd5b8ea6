"""How many tokens a prompt has: free where it is given as ids, else by a tokenizer.

In: a prompt and the lengths below which its exact count decides nothing. Out: its tokens, or its
bound when that is enough. Texts are counted by a tokenizer.json when there is one, off the event
loop; everything else, chats above all, by the upstream's /tokenize, which applies the template.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from plimsoll_engine.config import ConfigError
from plimsoll_engine.gate.demand import Prompt
from plimsoll_engine.gate.upstream import Upstream


def load_tokenizer(path: Path) -> Tokenizer:
    """Raises ConfigError."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 (the library raises nothing narrower)
        raise ConfigError("--tokenizer", path, f"a readable tokenizer.json ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class TokenCounter:
    def __init__(self, upstream: Upstream, tokenizer: Tokenizer | None) -> None:
        self._upstream = upstream
        self._tokenizer = tokenizer

    async def count(self, prompt: Prompt, headers: Mapping[str, str], *, enough: int | None) -> int:
        """``enough``: a bound up to this many tokens is as good as the count; None: never.
        Raises ApiError."""
        if prompt.tokens is not None:
            return prompt.tokens
        if enough is not None and prompt.bound is not None and prompt.bound <= enough:
            return prompt.bound
        question = prompt.question or {}
        text = question.get("prompt")
        if self._tokenizer is not None and isinstance(text, str):
            return await asyncio.to_thread(
                self._count_text, text, bool(question.get("add_special_tokens"))
            )
        return await self._upstream.count(question, headers)

    def _count_text(self, text: str, add_special_tokens: bool) -> int:
        assert self._tokenizer is not None
        return len(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
