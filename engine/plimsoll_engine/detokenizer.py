"""Tokens of one sequence -> text that may be shown, with stop strings looked for on the way.

In: token ids as they are generated. Out: text increments whose concatenation never depends on how
the tokens were batched, so that a stream and a plain answer are the same text. Held back are bytes
that do not yet make a character, and text that may still turn into a stop string. This module
knows neither HTTP nor the scheduler; stop *tokens* are the scheduler's matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# What a tokenizer puts in place of bytes that are not, or not yet, a character.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character is at most four bytes. A longer run without one is not text: show it as it is, or
# every further token would decode the whole run again.
MAX_UNDECODED_TOKENS = 32
# Tokens of the prompt that are decoded together with the first output token: some decoders strip
# the space of the first token they see.
CONTEXT_TOKENS = 5


class TokenDecoder(Protocol):
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True)
class StopMatch:
    """``text[start:end]`` is the stop string ``stop``."""

    stop: str
    start: int
    end: int


def find_stop(text: str, stops: Sequence[str], *, after: int = 0) -> StopMatch | None:
    """The match that is complete first, among those that end beyond ``after`` characters.

    Of two stop strings that end at the same character the longer one wins. This is the rule that
    text arriving in pieces can follow: nothing that comes later can change it.
    """
    matches = []
    for stop in stops:
        start = text.find(stop, max(0, after - len(stop) + 1))
        if start >= 0:
            matches.append(StopMatch(stop, start, start + len(stop)))
    return min(matches, key=lambda match: (match.end, match.start), default=None)


class StopFinder:
    """Releases text as soon as it can no longer be part of a stop string."""

    def __init__(self, stops: Sequence[str], *, include_in_output: bool) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._include = include_in_output
        self._held = ""
        self.match: StopMatch | None = None

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Takes the next piece; returns what may be shown now.

        A stop string that ends in a piece fed while not ``armed`` does not count. After a match
        nothing more is released.
        """
        if self.match is not None:
            return ""
        buffer = self._held + text
        # Matches that end inside the held text were seen (and ignored) when it was fed.
        self.match = find_stop(buffer, self._stops, after=len(self._held)) if armed else None
        if self.match is not None:
            self._held = ""
            return buffer[: self.match.end if self._include else self.match.start]
        keep = self._possible_beginning(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of ``text`` with which an unfinished stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            ending = text[len(text) - length :]
            if any(stop.startswith(ending) and len(stop) > length for stop in self._stops):
                return length
        return 0


class IncrementalDecoder:
    """Decodes one token after the other; returns only complete characters."""

    def __init__(
        self,
        decoder: TokenDecoder,
        *,
        skip_special_tokens: bool = True,
        context_token_ids: Sequence[int] = (),
    ) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        context = list(context_token_ids[-CONTEXT_TOKENS:])
        if self._decode(context).endswith(REPLACEMENT):
            context = []
        # The tokens behind the last text given out (as context), then those not shown yet:
        # _token_ids[:_shown] and _token_ids[_shown:].
        self._token_ids = context
        self._shown = len(context)

    def add(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        text = self._pending_text()
        undecoded = len(self._token_ids) - self._shown
        if text.endswith(REPLACEMENT) and undecoded <= MAX_UNDECODED_TOKENS:
            return ""
        if text:
            self._token_ids = self._token_ids[self._shown :]
            self._shown = len(self._token_ids)
        elif undecoded > MAX_UNDECODED_TOKENS:
            # Special tokens in a row, which show nothing: forget them, keep the context.
            del self._token_ids[self._shown :]
        return text

    def flush(self) -> str:
        """What is left at the end: bytes that never became a character, as the tokenizer shows
        them."""
        text = self._pending_text()
        self._shown = len(self._token_ids)
        return text

    def _pending_text(self) -> str:
        shown = self._decode(self._token_ids[: self._shown])
        return self._decode(self._token_ids)[len(shown) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


@dataclass(frozen=True)
class TextUpdate:
    """``num_tokens`` of the tokens given were used; fewer than all only if ``stop`` is set."""

    text: str
    num_tokens: int
    stop: str | None


class Detokenizer:
    """Text and stop strings of one sequence."""

    def __init__(
        self,
        decoder: TokenDecoder,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._incremental = IncrementalDecoder(
            decoder, skip_special_tokens=skip_special_tokens, context_token_ids=prompt_token_ids
        )
        self._finder = StopFinder(stop, include_in_output=include_stop_str_in_output)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def add(self, token_ids: Sequence[int]) -> TextUpdate:
        """A stop string counts once its last character comes from a token beyond min_tokens."""
        text = ""
        for used, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            piece = self._incremental.add(token_id)
            text += self._finder.feed(piece, armed=self._num_tokens > self._min_tokens)
            if self._finder.match is not None:
                return TextUpdate(text, used, self._finder.match.stop)
        return TextUpdate(text, len(token_ids), None)

    def finish(self) -> TextUpdate:
        """What was held back. Call once, when the sequence has ended without a stop string."""
        armed = self._num_tokens > self._min_tokens
        text = self._finder.feed(self._incremental.flush(), armed=armed)
        match = self._finder.match
        if match is None:
            text += self._finder.flush()
        return TextUpdate(text, 0, match.stop if match else None)
