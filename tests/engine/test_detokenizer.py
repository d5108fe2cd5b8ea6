"""Text from tokens: whole characters only, and the same text however it is cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plimsoll_engine.detokenizer import (
    MAX_UNDECODED_TOKENS,
    Detokenizer,
    IncrementalDecoder,
    StopFinder,
    find_stop,
)
from plimsoll_engine.server.text import TextCodec
from support.engine_server import END, byte_tokenizer, spell

# Few letters, so that stop strings occur, overlap and repeat.
TEXTS = st.text(alphabet="abé", max_size=40)
STOPS = st.lists(st.text(alphabet="abé", min_size=1, max_size=5), max_size=4)


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    """A text in pieces, empty ones included."""
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(pieces=cut_texts(), stops=STOPS, include=st.booleans(), armed_from=st.integers(0, 6))
@example(pieces=["ab", "a", "b"], stops=["bab"], include=False, armed_from=0)
@example(pieces=["a", "bb"], stops=["abb", "bb"], include=True, armed_from=0)
def test_any_cut_of_any_text_gives_what_a_search_of_the_whole_text_gives(
    pieces: list[str], stops: list[str], include: bool, armed_from: int
) -> None:
    """Pieces before ``armed_from`` are those of the first min_tokens tokens."""
    finder = StopFinder(stops, include_in_output=include)
    shown = "".join(
        finder.feed(piece, armed=number >= armed_from) for number, piece in enumerate(pieces)
    )
    shown += finder.flush()

    text = "".join(pieces)
    match = find_stop(text, stops, after=len("".join(pieces[:armed_from])))
    if match is None:
        assert (shown, finder.match) == (text, None)
    else:
        assert finder.match is not None
        assert finder.match.stop == match.stop
        assert shown == text[: match.end if include else match.start]


@given(pieces=cut_texts(), stops=STOPS)
def test_nothing_is_held_back_that_cannot_begin_a_stop_string(
    pieces: list[str], stops: list[str]
) -> None:
    finder = StopFinder(stops, include_in_output=False)
    text = shown = ""
    for piece in pieces:
        text += piece
        shown += finder.feed(piece)
        if finder.match is not None:
            return
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize(
    ("text", "stops", "stop", "before"),
    [
        ("one two", ["three"], None, "one two"),
        ("END OF it", ["END", "END OF"], "END", ""),
        ("xEND OF it", ["END OF", "ND"], "ND", "xE"),
        # Both are complete at the same character: the longer one.
        ("a stop!", ["op", "stop"], "stop", "a "),
    ],
)
def test_the_match_that_is_complete_first_wins(
    text: str, stops: list[str], stop: str | None, before: str
) -> None:
    match = find_stop(text, stops)
    assert (match.stop if match else None) == stop
    assert text[: match.start if match else None] == before


class Codec:
    """Decodes with a byte-level tokenizer, as the server does."""

    def __init__(self, pieces: Sequence[str] = ()) -> None:
        self.tokenizer = byte_tokenizer(pieces)
        self._codec = TextCodec(self.tokenizer)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._codec.decode(token_ids, skip_special_tokens=skip_special_tokens)


CODEC = Codec(["Hello", " EN", "D O", "F"])


@given(st.binary(max_size=30))
@example("🙂 naïve 日本".encode())
def test_characters_come_whole_and_nothing_is_lost(data: bytes) -> None:
    decoder = IncrementalDecoder(CODEC)
    pieces = [decoder.add(byte) for byte in data]
    expected = CODEC.decode(list(data), skip_special_tokens=True)
    assert "".join(pieces) + decoder.flush() == expected


def test_an_emoji_is_shown_with_its_last_byte() -> None:
    decoder = IncrementalDecoder(CODEC)
    assert [decoder.add(byte) for byte in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]


def test_a_long_run_of_broken_bytes_is_shown_and_not_decoded_for_ever() -> None:
    decoder = IncrementalDecoder(CODEC)
    pieces = [decoder.add(0x80) for _ in range(10 * MAX_UNDECODED_TOKENS)]
    shown = "".join(pieces)
    assert len(shown) >= 9 * MAX_UNDECODED_TOKENS
    assert shown + decoder.flush() == "�" * (10 * MAX_UNDECODED_TOKENS)


def test_special_tokens_are_skipped_unless_wanted() -> None:
    ids = spell(CODEC.tokenizer, "a", END, "b")
    for skip, text in ((True, "ab"), (False, f"a{END}b")):
        decoder = IncrementalDecoder(CODEC, skip_special_tokens=skip)
        assert "".join(decoder.add(token_id) for token_id in ids) == text


def test_many_special_tokens_in_a_row_leave_no_trace() -> None:
    end = spell(CODEC.tokenizer, END)[0]
    decoder = IncrementalDecoder(CODEC)
    ids = [ord("a"), *[end] * (3 * MAX_UNDECODED_TOKENS), ord("b")]
    assert "".join(decoder.add(token_id) for token_id in ids) == "ab"


class FirstSpaceStripped:
    """Decodes as SentencePiece models do: the space in front of the first word is not shown."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        words = {1: " The", 2: " sky", 3: " is", 4: " blue"}
        return "".join(words[token_id] for token_id in token_ids).removeprefix(" ")


def test_the_space_between_prompt_and_output_is_kept() -> None:
    detokenizer = Detokenizer(FirstSpaceStripped(), prompt_token_ids=[1, 2])
    assert detokenizer.add([3, 4]).text == " is blue"


def test_a_prompt_that_ends_inside_a_character_does_not_cut_the_output() -> None:
    start = "🙂".encode()[:2]
    detokenizer = Detokenizer(CODEC, prompt_token_ids=list(start))
    assert detokenizer.add(list(b"ok")).text == "ok"


def test_tokens_behind_the_stop_string_are_not_counted() -> None:
    ids = spell(CODEC.tokenizer, "Hello", " EN", "D O", "F", "Hello")
    update = Detokenizer(CODEC, stop=["END OF"]).add(ids)
    assert (update.text, update.num_tokens, update.stop) == ("Hello ", 4, "END OF")


def test_a_stop_string_inside_the_first_min_tokens_does_not_count() -> None:
    detokenizer = Detokenizer(CODEC, stop=["b"], min_tokens=3)
    update = detokenizer.add(list(b"abab"))
    assert (update.text, update.num_tokens, update.stop) == ("aba", 4, "b")


def test_what_was_held_back_comes_at_the_end() -> None:
    detokenizer = Detokenizer(CODEC, stop=["END OF"])
    assert detokenizer.add(spell(CODEC.tokenizer, "Hello", " EN")).text == "Hello "
    assert detokenizer.finish().text == "EN"


def test_broken_bytes_at_the_end_can_complete_a_stop_string() -> None:
    detokenizer = Detokenizer(CODEC, stop=["!�"])
    assert detokenizer.add([ord("a"), ord("!"), 0xF0]).text == "a"
    finish = detokenizer.finish()
    assert (finish.text, finish.stop) == ("", "!�")
