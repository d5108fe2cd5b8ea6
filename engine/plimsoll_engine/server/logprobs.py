"""Log-probabilities as the OpenAI endpoints, and vLLM for prompts, show them.

In: the executor's entries (the token itself first, then the alternatives). Out: the answer's types.
Nothing here knows requests or streams, except for the running text offset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plimsoll_engine.executor import TokenLogprob
from plimsoll_engine.server.answer_types import (
    ChatToken,
    PromptLogprob,
    PromptLogprobs,
    TextLogprobs,
    TokenCandidate,
)

# JSON has no minus infinity; this is what vLLM writes.
LOWEST_LOGPROB = -9999.0

TokenText = Callable[[int], str]


def chat_logprobs(
    entries: Sequence[tuple[TokenLogprob, ...]], token_text: TokenText
) -> list[ChatToken]:
    """One item of ``logprobs.content`` per token."""
    tokens = []
    for own, *alternatives in entries:
        text = token_text(own.token_id)
        top = [_candidate(entry, token_text) for entry in alternatives]
        tokens.append(ChatToken(text, _finite(own.logprob), list(text.encode()), top))
    return tokens


def prompt_logprobs(
    entries: Sequence[tuple[TokenLogprob, ...]], num_top: int, token_text: TokenText
) -> PromptLogprobs:
    """``entries`` start with the prompt's second token, and may have more than the ``num_top`` most
    likely tokens that are shown."""
    return [
        None,
        *(
            {
                shown.token_id: PromptLogprob(
                    _finite(shown.logprob), shown.rank, token_text(shown.token_id)
                )
                for shown in each[: 1 + num_top]
            }
            for each in entries
        ),
    ]


class CompletionLogprobs:
    """Builds the four parallel lists of /v1/completions, piece by piece of one choice."""

    def __init__(self, token_text: TokenText) -> None:
        self._token_text = token_text
        self._offset = 0

    def prompt(
        self, token_ids: Sequence[int], entries: Sequence[tuple[TokenLogprob, ...]]
    ) -> TextLogprobs:
        """``entries`` start with the second token: nothing precedes the first, which has null."""
        first = self._lists([(self._token_text(token_ids[0]), None, None)])
        extend_logprobs(first, self.output(entries))
        return first

    def output(self, entries: Sequence[tuple[TokenLogprob, ...]]) -> TextLogprobs:
        rows = []
        for entry in entries:
            # The sampled token is always among its alternatives, as in vLLM.
            top = {self._token_text(each.token_id): _finite(each.logprob) for each in entry}
            rows.append((self._token_text(entry[0].token_id), _finite(entry[0].logprob), top))
        return self._lists(rows)

    def _lists(
        self, rows: Sequence[tuple[str, float | None, dict[str, float] | None]]
    ) -> TextLogprobs:
        lists = TextLogprobs([], [], [], [])
        for text, logprob, top in rows:
            lists.text_offset.append(self._offset)
            lists.token_logprobs.append(logprob)
            lists.tokens.append(text)
            lists.top_logprobs.append(top)
            self._offset += len(text)
        return lists


def extend_logprobs(lists: TextLogprobs, more: TextLogprobs) -> None:
    lists.text_offset += more.text_offset
    lists.token_logprobs += more.token_logprobs
    lists.tokens += more.tokens
    lists.top_logprobs += more.top_logprobs


def _candidate(entry: TokenLogprob, token_text: TokenText) -> TokenCandidate:
    text = token_text(entry.token_id)
    return TokenCandidate(text, _finite(entry.logprob), list(text.encode()))


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
