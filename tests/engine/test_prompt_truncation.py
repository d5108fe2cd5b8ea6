"""``truncate_prompt_tokens`` and ``truncation_side``: a prompt that is cut instead of refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.engine_server import BEGIN, ApiServer, api_server, byte_tokenizer, repeat

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    """One byte is a token; the ceiling is 2048."""
    with api_server(repeat("z")) as running:
        yield running


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"prompt": "abcdef", "truncate_prompt_tokens": 4}, "cdef"),
        ({"prompt": "abcdef", "truncate_prompt_tokens": 4, "truncation_side": "left"}, "cdef"),
        ({"prompt": "abcdef", "truncate_prompt_tokens": 4, "truncation_side": "right"}, "abcd"),
        ({"prompt": "abcdef", "truncate_prompt_tokens": 6}, "abcdef"),
        ({"prompt": "abcdef", "truncate_prompt_tokens": 1}, "f"),
        ({"prompt": "abcdef", "truncate_prompt_tokens": -1}, "abcdef"),
        # Without a length the side says nothing.
        ({"prompt": "abcdef", "truncation_side": "right"}, "abcdef"),
        ({"prompt": [97, 98, 99], "truncate_prompt_tokens": 2}, "bc"),
        (
            {"prompt": [97, 98, 99], "truncate_prompt_tokens": 2, "truncation_side": "right"},
            "ab",
        ),
    ],
)
def test_what_is_kept_of_a_prompt(server: ApiServer, asked: dict[str, Any], kept: str) -> None:
    document = server.complete(**asked, echo=True, max_tokens=1)
    assert document["choices"][0]["text"] == f"{kept}z"
    assert document["usage"]["prompt_tokens"] == len(kept)
    first = server.stream(**asked, echo=True, max_tokens=1)[0]
    assert first["choices"][0]["text"] == kept


def test_each_prompt_of_a_list_is_cut_by_itself(server: ApiServer) -> None:
    document = server.complete(
        prompt=["abc", "d", "efghi"], truncate_prompt_tokens=2, echo=True, max_tokens=1
    )
    assert [choice["text"] for choice in document["choices"]] == ["bcz", "dz", "hiz"]


@pytest.mark.parametrize("prompt", ["y" * 2100, "y" * 1_000_000, [121] * 2100, [121] * 1_000_000])
@pytest.mark.parametrize(
    ("asked", "prompt_tokens", "completion_tokens"),
    [
        # Room is left for the output: what is asked for, or the default of 16.
        ({"truncate_prompt_tokens": -1}, 2032, 16),
        ({"truncate_prompt_tokens": -1, "max_tokens": 100}, 1948, 100),
        ({"truncate_prompt_tokens": 2000}, 2000, 16),
        ({"truncate_prompt_tokens": 2040}, 2040, 8),
    ],
)
def test_a_prompt_beyond_the_model_is_cut(
    server: ApiServer,
    prompt: object,
    asked: dict[str, Any],
    prompt_tokens: int,
    completion_tokens: int,
) -> None:
    usage = server.complete(prompt=prompt, **asked)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (
        prompt_tokens,
        completion_tokens,
    )


def test_a_cut_prompt_and_its_output_are_within_the_model_all_the_same(server: ApiServer) -> None:
    response = server.post(
        "/v1/completions", prompt="y" * 3000, truncate_prompt_tokens=2000, max_tokens=49
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input_tokens"


@pytest.mark.parametrize(
    ("asked", "prompt_tokens", "completion_tokens"),
    [
        ({"truncate_prompt_tokens": -1}, 2047, 1),
        ({"truncate_prompt_tokens": -1, "max_completion_tokens": 48}, 2000, 48),
        ({"truncate_prompt_tokens": 14, "max_tokens": 3}, 14, 3),
    ],
)
def test_a_chat_is_cut_as_its_template_wrote_it(
    server: ApiServer, asked: dict[str, Any], prompt_tokens: int, completion_tokens: int
) -> None:
    messages = [{"role": "user", "content": "y" * 100_000 + "!"}]
    # Of its own, or the executor would see only what the cache has not.
    salt = str(asked)
    usage = server.post(CHAT, messages=messages, cache_salt=salt, **asked).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (
        prompt_tokens,
        completion_tokens,
    )
    last = server.executor.batches[-1].chunks[0].request_id
    read = server.executor.tokens[last]
    assert bytes(read[at] for at in range(prompt_tokens)).endswith(b"y!<assistant>")


@pytest.mark.parametrize("length", [1, 2, 5, 9, 40])
@pytest.mark.parametrize("side", ["left", "right"])
def test_what_the_tokenizer_adds_stays_as_in_transformers(length: int, side: str) -> None:
    text = "a ship, deep"
    reference = byte_tokenizer(adds_begin_token=True)
    reference.truncation_side = side
    kept = reference(text, truncation=True, max_length=length)["input_ids"]
    with api_server(repeat("z"), tokenizer=byte_tokenizer(adds_begin_token=True)) as server:
        document = server.complete(
            prompt=text,
            truncate_prompt_tokens=length,
            truncation_side=side,
            echo=True,
            max_tokens=1,
        )
        assert document["usage"]["prompt_tokens"] == len(kept)
        assert document["choices"][0]["text"] == f"{reference.decode(kept)}z"
        assert document["choices"][0]["text"].startswith(BEGIN)
