"""Case B09: no part of a stop string is ever streamed, and both modes say the same."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from support.engine_server import END, ApiServer, api_server, byte_tokenizer, say, spell

PIECES = ["Hello", " EN", "D O", "F", " tail", "D I", "T"]
TOKENIZER = byte_tokenizer(PIECES)
END_ID = spell(TOKENIZER, END)[0]
STOPPED = say(spell(TOKENIZER, "Hello", " EN", "D O", "F", " tail", " tail", " tail"), END_ID)
MISSED = say(spell(TOKENIZER, "Hello", " EN", "D I", "T"), END_ID)


def both_modes(server: ApiServer, **body: Any) -> tuple[str, str, str | None, int, list[str]]:
    """Text, finish and stop reason, completion tokens (the same in both), and the deltas."""
    body = {"prompt": "x", "max_tokens": 16, **body}
    whole = server.complete(**body)
    events = server.stream(**body, stream_options={"include_usage": True})
    *parts, usage = events
    deltas = [part["choices"][0]["text"] for part in parts]
    last = parts[-1]["choices"][0]
    choice = whole["choices"][0]
    assert "".join(deltas) == choice["text"]
    assert last["finish_reason"] == choice["finish_reason"]
    assert last["stop_reason"] == choice["stop_reason"]
    assert last["text"] == ""
    tokens = whole["usage"]["completion_tokens"]
    assert usage["usage"]["completion_tokens"] == tokens
    return choice["text"], choice["finish_reason"], choice["stop_reason"], tokens, deltas


def test_no_part_of_a_stop_string_is_streamed() -> None:
    with api_server(STOPPED, tokenizer=TOKENIZER) as server:
        text, reason, stop, tokens, deltas = both_modes(server, stop=["END OF"])
        assert (text, reason, stop, tokens) == ("Hello ", "stop", "END OF", 4)
        assert not any(letter in delta for delta in deltas for letter in "END")


def test_text_held_back_is_delivered_before_the_finish_reason() -> None:
    with api_server(MISSED, tokenizer=TOKENIZER) as server:
        text, reason, stop, tokens, deltas = both_modes(server, stop=["END OF"])
        assert (text, reason, stop, tokens) == ("Hello END IT", "stop", None, 5)
        # A text that ends while some of it is held back: what is left comes, then the reason.
        text, reason, _, _, deltas = both_modes(server, stop=["END OF"], max_tokens=2)
        assert (text, reason) == ("Hello EN", "length")
        assert deltas == ["Hello", " ", "EN", ""] or deltas == ["Hello", " EN", ""]


def test_the_stop_string_is_shown_when_asked_for() -> None:
    with api_server(STOPPED, tokenizer=TOKENIZER) as server:
        text, reason, *_ = both_modes(server, stop="END OF", include_stop_str_in_output=True)
        assert (text, reason) == ("Hello END OF", "stop")


@pytest.mark.parametrize("stops", [["END OF", "END"], ["END", "END OF"]])
def test_of_a_stop_string_and_its_prefix_the_earlier_match_stops(stops: list[str]) -> None:
    with api_server(STOPPED, tokenizer=TOKENIZER) as server:
        text, _, stop, tokens, _ = both_modes(server, stop=stops)
        assert (text, stop, tokens) == ("Hello ", "END", 3)


def test_the_core_is_told_to_stop_generating() -> None:
    with api_server(STOPPED, tokenizer=TOKENIZER) as server:
        both_modes(server, stop=["END OF"], max_tokens=2000, ignore_eos=True)
        assert server.core.drain(5)
        assert server.core.snapshot().used_blocks == 0
        ended = server.metrics()
        assert ended['vllm:request_success_total{finished_reason="stop"}'] == 2
        assert ended['vllm:request_success_total{finished_reason="abort"}'] == 0


def test_chat_holds_back_as_well() -> None:
    with api_server(STOPPED, tokenizer=TOKENIZER) as server:
        messages = [{"role": "user", "content": "x"}]
        events = server.stream("/v1/chat/completions", messages=messages, stop="END OF")
        deltas = [event["choices"][0]["delta"].get("content", "") for event in events]
        assert "".join(deltas) == "Hello "
        assert "END" not in json.dumps(deltas)


def test_each_choice_has_a_stop_of_its_own() -> None:
    """Requests of one body meet their stop strings at different tokens."""
    first: list[str] = []
    lock = threading.Lock()

    def script(request_id: str, position: int) -> int:
        with lock:
            if request_id not in first:
                first.append(request_id)
        letters = b"aX" if request_id == first[0] else b"aaaaX"
        return letters[position % len(letters)]

    with api_server(script) as server:
        document = server.complete(prompt="x", n=2, stop="X")
        assert sorted(choice["text"] for choice in document["choices"]) == ["a", "aaaa"]
        assert document["usage"]["completion_tokens"] == 2 + 5
