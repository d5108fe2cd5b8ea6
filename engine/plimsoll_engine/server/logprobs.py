"""Log-probabilities as the two OpenAI endpoints show them.

In: the executor's entries (the token itself first, then the alternatives). Out: JSON-ready
dictionaries. Nothing here knows requests or streams, except for the running text offset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from plimsoll_engine.executor import TokenLogprob

# JSON has no minus infinity; this is what vLLM writes.
LOWEST_LOGPROB = -9999.0

TokenText = Callable[[int], str]


def chat_logprobs(
    entries: Sequence[tuple[TokenLogprob, ...]], token_text: TokenText
) -> list[dict[str, Any]]:
    """One item of ``logprobs.content`` per token."""
    return [
        {
            **_chat_token(own, token_text),
            "top_logprobs": [_chat_token(entry, token_text) for entry in alternatives],
        }
        for own, *alternatives in entries
    ]


class CompletionLogprobs:
    """Builds the four parallel lists of /v1/completions, piece by piece of one choice."""

    def __init__(self, token_text: TokenText) -> None:
        self._token_text = token_text
        self._offset = 0

    def prompt(
        self, token_ids: Sequence[int], entries: Sequence[tuple[TokenLogprob, ...]]
    ) -> dict[str, list[Any]]:
        """``entries`` start with the second token: nothing precedes the first, which has null."""
        first = self._lists([(self._token_text(token_ids[0]), None, None)])
        extend_logprobs(first, self.output(entries))
        return first

    def output(self, entries: Sequence[tuple[TokenLogprob, ...]]) -> dict[str, list[Any]]:
        rows = []
        for entry in entries:
            # The sampled token is always among its alternatives, as in vLLM.
            top = {self._token_text(each.token_id): _finite(each.logprob) for each in entry}
            rows.append((self._token_text(entry[0].token_id), _finite(entry[0].logprob), top))
        return self._lists(rows)

    def _lists(
        self, rows: Sequence[tuple[str, float | None, dict[str, float] | None]]
    ) -> dict[str, list[Any]]:
        lists: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for text, logprob, top in rows:
            lists["text_offset"].append(self._offset)
            lists["token_logprobs"].append(logprob)
            lists["tokens"].append(text)
            lists["top_logprobs"].append(top)
            self._offset += len(text)
        return lists


def extend_logprobs(lists: dict[str, list[Any]], more: dict[str, list[Any]]) -> None:
    for key, values in more.items():
        lists[key] += values


def _chat_token(entry: TokenLogprob, token_text: TokenText) -> dict[str, Any]:
    text = token_text(entry.token_id)
    return {"token": text, "logprob": _finite(entry.logprob), "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
