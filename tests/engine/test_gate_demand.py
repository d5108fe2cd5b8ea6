"""What a request's body demands, and that nothing in it goes uncounted or fails in another way."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plimsoll_engine.gate.demand import (
    Demand,
    bound_text,
    limit_output,
    read_chat,
    read_completion,
)
from plimsoll_engine.server.errors import ApiError

HELLO = [{"role": "user", "content": "hello"}]


def completion(**body: Any) -> Demand:
    return read_completion(json.dumps(body).encode())


def chat(**body: Any) -> Demand:
    return read_chat(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("demand", "max_tokens", "sequences"),
    [
        (completion(prompt="x"), 16, 1),
        (completion(prompt="x", max_tokens=None), None, 1),
        (completion(prompt="x", max_tokens=0), 0, 1),
        (completion(prompt=["x", [1, 2]], max_tokens=7, n=3), 7, 6),
        (completion(prompt=[1, 2], best_of=4), 16, 4),
        (chat(messages=HELLO), None, 1),
        (chat(messages=HELLO, max_tokens=5), 5, 1),
        (chat(messages=HELLO, max_tokens=5, max_completion_tokens=6), 6, 1),
        (chat(messages=HELLO, max_tokens=5, max_completion_tokens=None), 5, 1),
    ],
)
def test_limits_of_output_and_sequences(
    demand: Demand, max_tokens: int | None, sequences: int
) -> None:
    assert (demand.max_tokens, demand.sequences) == (max_tokens, sequences)


def test_token_ids_are_counted_and_texts_are_bounded() -> None:
    ids, text = completion(prompt=[[1, 2, 3], "four"]).prompts
    assert (ids.tokens, ids.question) == (3, None)
    assert text.tokens is None
    assert text.bound == 4 + 8
    assert text.question == {"model": None, "prompt": "four", "add_special_tokens": True}


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function"}]},
        {"chat_template": "{{ 'x' * 100000 }}"},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"documents": [{"text": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        {"messages": [{"role": "user", "content": 7}]},
    ],
)
def test_what_a_template_may_blow_up_has_no_bound(more: dict[str, Any]) -> None:
    (plain,) = chat(messages=HELLO).prompts
    assert plain.bound is not None
    (prompt,) = chat(**({"messages": HELLO} | more)).prompts
    assert prompt.bound is None


def test_the_question_renders_as_the_request_would() -> None:
    rendering = {"add_generation_prompt": False, "continue_final_message": True, "tools": []}
    (prompt,) = chat(model="m", messages=HELLO, **rendering).prompts
    assert prompt.question == {"model": "m", "messages": HELLO, **rendering}
    own = {"reasoning_effort": "low", "chat_template_kwargs": {"a": 1}}
    (prompt,) = chat(messages=HELLO, **own).prompts
    assert prompt.question is not None
    assert prompt.question["chat_template_kwargs"] == {"reasoning_effort": "low", "a": 1}


@given(st.text(max_size=50))
@example("\ufdfa")
@example("\ufdfb" * 3)
def test_normalisation_never_passes_the_bound(text: str) -> None:
    try:
        longest = max(len(unicodedata.normalize(form, text).encode()) for form in ("NFKC", "NFKD"))
    except UnicodeEncodeError:
        return
    assert longest <= bound_text(text)


def test_a_limit_of_output_is_added_and_nothing_else_is_touched() -> None:
    body = b'{"messages":[{"role":"user","content":"\\u00e9 1.50"}], "x":1e400, "max_tokens":null}'
    limited = limit_output(body, 9, chat=True)
    assert b'"x":1e400' in limited
    assert b'{"role":"user","content":"\\u00e9 1.50"}' in limited
    assert b'"max_completion_tokens":9' in limited
    twice = limit_output(b'{"max_tokens":null,"max_tokens":null}', 9, chat=False)
    assert json.loads(twice) == {"max_tokens": 9}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
fields = st.sampled_from(
    [
        "prompt",
        "messages",
        "n",
        "best_of",
        "max_tokens",
        "max_completion_tokens",
        "truncate_prompt_tokens",
        "tools",
        "chat_template_kwargs",
        "documents",
        "reasoning_effort",
        "add_special_tokens",
        "model",
    ]
)
messages = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name", "x"]), values, max_size=3),
    max_size=2,
)


def read_or_refuse(read: Callable[[bytes], Demand], body: bytes) -> Demand | int:
    """The demand, or the status of the refusal; any other error is the test's."""
    try:
        return read(body)
    except ApiError as error:
        return error.status


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(fields, values, max_size=4), messages)
@example({"prompt": "\ud800"}, [{"role": "user", "content": "\ud800"}])
def test_any_json_is_read_or_refused(body: dict[str, Any], chat_messages: list[Any]) -> None:
    for read, document in (
        (read_completion, body),
        (read_chat, body | {"messages": chat_messages}),
    ):
        demand = read_or_refuse(read, json.dumps(document).encode())
        if isinstance(demand, int):
            assert demand == 400
            continue
        assert demand.prompts
        assert demand.choices >= 1
        assert demand.max_tokens is None or demand.max_tokens >= 0


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    for read in (read_completion, read_chat):
        assert isinstance(read_or_refuse(read, body), Demand) or read_or_refuse(read, body) == 400
