"""Requests that are too long, too many or too large: refused before they cost anything."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from plimsoll_engine.executor import StepBatch
from plimsoll_engine.server.protocol import MAX_PROMPT_LOGPROBS
from plimsoll_engine.server.text import Prompt, TextCodec
from support.engine_server import ApiServer, api_server, assert_refused, byte_tokenizer, repeat

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with api_server(repeat("the quick brown fox ")) as running:
        yield running


HUGE = 8 << 20
LONG_CHATS: list[tuple[dict[str, Any], list[str]]] = [
    ({"messages": [{"role": "x" * HUGE, "content": "a"}]}, ["role", str(HUGE), "<= 256"]),
    (
        {"messages": [{"role": "user", "name": "x" * HUGE, "content": "a"}]},
        ["name", str(HUGE), "<= 256"],
    ),
    ({"messages": CHAT * 300_000}, ["messages", "300000", "<= 8192"]),
    (
        {"messages": CHAT, "chat_template_kwargs": {"a": "x" * HUGE}},
        ["chat_template_kwargs", str(HUGE)[:4], "65536"],
    ),
    ({"messages": [{"role": "user", "content": "x" * HUGE}]}, ["maximum context length"]),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}] * 200_000}]},
        ["maximum context length"],
    ),
    ({"messages": [{"role": "user", "content": ""}] * 8192}, ["maximum context length"]),
]


@pytest.mark.parametrize(("body", "named"), LONG_CHATS)
def test_a_long_chat_is_refused_before_it_costs_anything(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], named: list[str]
) -> None:
    longest = server.service.model.ceiling * server.service.codec.max_chars_per_token
    encoded: list[int] = []
    encode = TextCodec.encode

    def count(codec: TextCodec, text: str, *, add_special_tokens: bool = True) -> Prompt:
        encoded.append(len(text))
        return encode(codec, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(TextCodec, "encode", count)
    for path in ("/v1/chat/completions", "/tokenize"):
        assert_refused(server, path, body, *named)
    assert max(encoded, default=0) <= longest


def test_what_a_template_makes_of_a_chat_is_measured_too() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.content * 1000 }}{% endfor %}"
    )
    with api_server(tokenizer=tokenizer) as server:
        body = {"messages": [{"role": "user", "content": "x" * 1000}]}
        assert_refused(server, "/v1/chat/completions", body, "maximum context length", "1000000")


@pytest.mark.parametrize(
    ("prompt", "n", "logprobs", "figures_named"),
    [
        ([[1] * 2000] * 60, 1, 20, ["120000", "20 + 1", "2520000"]),
        ([1] * 2000, 128, 1, ["2000", "n 128", "512000"]),
        ("a" * 2000, 128, 1, ["2000", "n 128", "512000"]),
        ([[1] * 1500] * 200, 1, 0, ["300000", "0 + 1"]),
    ],
)
def test_prompt_logprobs_are_bounded_in_one_request(
    server: ApiServer, prompt: object, n: int, logprobs: int, figures_named: list[str]
) -> None:
    body = {"prompt": prompt, "n": n, "max_tokens": 0, "echo": True, "logprobs": logprobs}
    assert_refused(server, "/v1/completions", body, str(MAX_PROMPT_LOGPROBS), *figures_named)


def test_the_prompt_logprobs_of_one_long_prompt_are_served(server: ApiServer) -> None:
    document = server.complete(prompt=[1] * 2000, max_tokens=0, echo=True, logprobs=20)
    assert len(document["choices"][0]["logprobs"]["token_logprobs"]) == 2000


def test_a_huge_body_is_413_before_it_is_read_whole(server: ApiServer) -> None:
    body = b'{"prompt": "' + b"a" * (33 << 20) + b'"}'
    response = server.client.post("/v1/completions", content=body)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == 413


@pytest.mark.parametrize(
    "body",
    [
        # The ceiling is 2048: no room, room for less, and more than there ever is.
        {"prompt": [1] * 2048},
        {"prompt": [1] * 2047, "max_tokens": 2},
        {"prompt": [1], "max_tokens": 2048},
        {"prompt": [1] * 5000},
        {"prompt": "a" * 2100},
        {"prompt": "a" * 100_000},
    ],
)
def test_too_long_is_400_in_the_words_that_clients_look_for(
    server: ApiServer, body: dict[str, Any]
) -> None:
    response = server.post("/v1/completions", model="m", **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].startswith("This model's maximum context length is 2048 tokens.")
    assert error["param"] in ("input_tokens", "input_text")


def test_the_last_length_that_fits_is_served(server: ApiServer) -> None:
    assert server.complete(prompt=[1] * 2047, max_tokens=1)
    # Nobody asked for more than there is: what fits is made.
    assert server.complete(prompt=[1] * 2045)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("path", "body", "sequences"),
    [
        ("/v1/completions", {"prompt": "a", "n": 8}, 8),
        ("/v1/completions", {"prompt": ["a"] * 4}, 4),
        ("/v1/completions", {"prompt": ["a"] * 3, "n": 2}, 6),
        ("/v1/chat/completions", {"messages": CHAT, "n": 10}, 10),
    ],
)
def test_an_idle_engine_takes_what_it_has_room_for(
    path: str, body: dict[str, Any], sequences: int
) -> None:
    with api_server(max_num_seqs=8, max_num_queued_reqs=2) as server:
        for _ in range(5):
            response = server.post(path, model="m", max_tokens=2, **body)
            assert response.status_code == 200, response.text
            assert len(response.json()["choices"]) == sequences
        for named, more in (("messages", {"messages": CHAT}), ("prompt", {"prompt": "a"})):
            at = "/v1/chat/completions" if named == "messages" else "/v1/completions"
            assert_refused(server, at, {"max_tokens": 2, "n": 11} | more, "11")


def test_a_full_queue_is_429_with_retry_after() -> None:
    decoding, gate = threading.Event(), threading.Event()

    def before_step(batch: StepBatch) -> None:
        if batch.chunks[0].start > 0:
            decoding.set()
            gate.wait(20)

    body = {"model": "m", "prompt": "a", "stream": True}
    with (
        api_server(
            repeat("a"), before_step=before_step, max_num_seqs=1, max_num_queued_reqs=1
        ) as server,
        ExitStack() as streams,
    ):
        streams.callback(gate.set)
        for _ in range(2):
            # One runs, in its second step, at the gate; then one waits.
            response = streams.enter_context(
                server.client.stream("POST", "/v1/completions", json=body)
            )
            assert response.status_code == 200
            assert decoding.wait(10)
        refused = server.post("/v1/completions", model="m", prompt="a")
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "RateLimitError"
        metrics = server.metrics()
        assert metrics['plimsoll:requests_rejected_total{reason="queue_full"}'] == 1
        assert metrics["vllm:num_requests_running"] == 1
        assert metrics["vllm:num_requests_waiting"] == 1
        gate.set()
