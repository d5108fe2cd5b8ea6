"""Bad requests end at the door with HTTP 400 (cases B10 and B11); the engine lives on."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from plimsoll_engine.server.protocol import MAX_TOKEN_ENTRIES
from plimsoll_engine.server.text import TextCodec
from plimsoll_engine.server.validation import SamplingDefaults, clamp_temperature, read_defaults
from support.engine_server import (
    END,
    ApiServer,
    Pace,
    api_server,
    assert_refused,
    byte_tokenizer,
    parse_events,
    repeat,
)
from support.scripted_executor import TINY_MODEL, ScriptedExecutor, figures

SAID = "the quick brown fox "
COMPANION_TOKENS = 1500
CHAT = [{"role": "user", "content": "hi"}]


@contextmanager
def companion_stream(server: ApiServer, pace: Pace) -> Iterator[None]:
    """Another client's stream, which runs all the while and must end as if nothing happened."""
    begun = threading.Event()
    lines: list[str] = []

    def read() -> None:
        body = {"model": "m", "prompt": "go", "stream": True, "max_tokens": COMPANION_TOKENS}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                lines.append(line)
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(10)
    try:
        yield
        assert reader.is_alive(), "the other stream ended too early to prove anything"
    finally:
        pace.release()
        reader.join(30)
    choices = [event["choices"][0] for event in parse_events("\n".join(lines))]
    text = "".join(choice["text"] for choice in choices)
    assert text == (SAID * COMPANION_TOKENS)[:COMPANION_TOKENS]
    assert choices[-1]["finish_reason"] == "length"


def test_b10_an_empty_prompt_or_no_new_token_does_not_kill_the_engine() -> None:
    pace = Pace()
    with api_server(repeat(SAID), before_step=pace) as server, companion_stream(server, pace):
        at = "/v1/completions"
        assert_refused(server, at, {"model": "m", "prompt": "", "max_tokens": 4}, "prompt")
        assert_refused(server, at, {"model": "m", "prompt": [], "max_tokens": 4}, "prompt")
        body: dict[str, Any] = {"model": "m", "prompt": "The sky is", "max_tokens": 0}
        assert_refused(server, at, body, "max_tokens", "0")

        document = server.complete(**body, echo=True, logprobs=1)
        choice = document["choices"][0]
        assert choice["text"] == "The sky is"
        assert choice["finish_reason"] == "length"
        first, *others = choice["logprobs"]["token_logprobs"]
        assert first is None
        assert len(others) == 9
        assert all(-100 < value <= 0 for value in others)
        assert document["usage"]["completion_tokens"] == 0

        document = server.complete(model="m", prompt="The sky is", max_tokens=1)
        assert document["choices"][0]["finish_reason"] == "length"
        assert document["usage"]["completion_tokens"] == 1
        assert server.client.get("/health").status_code == 200


def test_b10_with_a_begin_token_an_empty_prompt_is_a_prompt() -> None:
    with api_server(tokenizer=byte_tokenizer(adds_begin_token=True)) as server:
        assert server.complete(prompt="", max_tokens=4)["usage"]["prompt_tokens"] == 1
        body = {"model": "m", "prompt": "", "max_tokens": 4, "add_special_tokens": False}
        assert_refused(server, "/v1/completions", body, "prompt")


B11: list[tuple[str, dict[str, Any]]] = [
    ("stop_token_ids", {"prompt": "hi", "min_tokens": 2, "stop_token_ids": [999999]}),
    ("logit_bias", {"prompt": "hi", "logit_bias": {"999999": 5}}),
    ("logit_bias", {"prompt": "hi", "logit_bias": {"abc": 5}}),
    ("prompt", {"prompt": [1, 999999]}),
    ("prompt", {"prompt": [-1]}),
    ("logprobs", {"prompt": "hi", "logprobs": 5000}),
]


def test_b11_a_token_id_outside_the_vocabulary_is_refused() -> None:
    pace, pid = Pace(), os.getpid()
    with api_server(repeat(SAID), before_step=pace) as server, companion_stream(server, pace):
        for field, body in B11:
            body = {"model": "m", "max_tokens": 8} | body
            assert_refused(server, "/v1/completions", body, field)
        assert server.core.failure is None
        assert os.getpid() == pid


def test_b11_the_range_is_that_of_the_logits_not_of_the_tokenizer() -> None:
    """The tokenizer has 258 entries, the logits 1000."""
    with api_server() as server:
        assert server.complete(prompt=[999], max_tokens=1)
        body = {"model": "m", "prompt": [1000], "max_tokens": 1}
        assert_refused(server, "/v1/completions", body, "prompt[0]", "1000", "from 0 to 999")
        assert server.complete(prompt="a", max_tokens=1, logit_bias={"999": -100})
        assert server.complete(prompt="a", max_tokens=1, stop_token_ids=[999])


SMALL = replace(TINY_MODEL, vocab_size=200)
# Ids of the byte tokenizer's: "é" is 195 and 169, "ÿ" 195 and 191, "€" 226 first, BEGIN 257.
OUTSIDE: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "a€"}, "226"),
    ("/v1/completions", {"prompt": ["a", "€"]}, "226"),
    ("/v1/completions", {"prompt": f"a{END}"}, "256"),
    ("/v1/completions", {"prompt": "a€", "echo": True, "logprobs": 1, "max_tokens": 0}, "226"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "€"}]}, "226"),
    ("/v1/chat/completions", {"messages": [{"role": "€", "content": "a"}]}, "226"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "€"}]}]},
        "226",
    ),
    ("/tokenize", {"prompt": "€"}, "226"),
    ("/tokenize", {"messages": [{"role": "user", "content": "€"}]}, "226"),
]


def test_no_text_becomes_a_token_that_the_model_has_no_embedding_of() -> None:
    """The tokenizer has 258 entries, the model 200."""
    executor = ScriptedExecutor(repeat("a"), memory_figures=figures(160), limits=SMALL)
    with api_server(executor=executor, defaults=SamplingDefaults()) as server:
        for path, body, token_id in OUTSIDE:
            assert_refused(server, path, body, f"Token id {token_id} is out of vocabulary", "199")
        assert server.complete(prompt="é", max_tokens=1)
        assert_only_known_tokens(executor)


def test_nor_does_what_the_tokenizer_adds_by_itself() -> None:
    executor = ScriptedExecutor(repeat("a"), memory_figures=figures(160), limits=SMALL)
    tokenizer = byte_tokenizer(adds_begin_token=True)
    with api_server(executor=executor, tokenizer=tokenizer, defaults=SamplingDefaults()) as server:
        body: dict[str, Any] = {"prompt": "a", "max_tokens": 1}
        assert_refused(server, "/v1/completions", body, "Token id 257 is out of vocabulary")
        assert server.complete(**body, add_special_tokens=False)
        assert_only_known_tokens(executor)


def assert_only_known_tokens(executor: ScriptedExecutor) -> None:
    chunks = [chunk for batch in executor.batches for chunk in batch.chunks]
    assert chunks
    assert max(max(chunk.token_ids) for chunk in chunks) < SMALL.vocab_size


@pytest.mark.parametrize("outside", [200, 10**6, 2**63, -1])
def test_an_end_that_the_model_cannot_say_is_no_end(outside: int) -> None:
    """With min_tokens the sampler forbids the ends: by their places in the logits."""
    defaults = read_defaults({}, frozenset({0, 199, outside}), 200)
    assert defaults.eos_token_ids == {0, 199}


@pytest.mark.parametrize(
    ("asked", "used"), [(0.0, 0.0), (1e-38, 0.01), (5e-324, 0.01), (0.01, 0.01), (0.7, 0.7)]
)
def test_a_temperature_is_zero_or_at_least_a_hundredth(asked: float, used: float) -> None:
    assert clamp_temperature(asked) == used


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with api_server(repeat(SAID)) as running:
        yield running


# Field, value, and what the message says is allowed.
COMMON = [
    ("n", 0, ">= 1"),
    ("n", 129, "<= 128"),
    ("n", 1.5, "int"),
    ("n", "two", "int"),
    ("max_tokens", -1, ">= 0"),
    ("max_tokens", True, "int"),
    ("temperature", -0.1, ">= 0"),
    ("temperature", "hot", "float"),
    ("top_p", 0, "> 0"),
    ("top_p", 1.01, "<= 1"),
    ("top_k", -2, ">= -1"),
    ("min_p", 1.5, "<= 1"),
    ("presence_penalty", 2.5, "<= 2"),
    ("frequency_penalty", -3, ">= -2"),
    ("temperature", 1e300, "<= 100"),
    ("temperature", 100.1, "<= 100"),
    ("repetition_penalty", 0, ">= 0.01"),
    ("repetition_penalty", 1e-300, ">= 0.01"),
    ("repetition_penalty", 101, "<= 100"),
    ("seed", 2**63, "<= 9223372036854775807"),
    ("seed", 0.5, "int"),
    ("min_tokens", -1, ">= 0"),
    ("min_tokens", 9, "max_tokens (8)"),
    ("stop", "", "length >= 1"),
    ("stop", ["a", ""], "length >= 1"),
    ("stop", ["a"] * 65, "length <= 64"),
    ("stop", 5, "str | array"),
    ("stop", {"a": 1}, "str | array"),
    ("stop", {}, "str | array"),
    ("stop", 0, "str | array"),
    ("stop", False, "str | array"),
    ("stop_token_ids", [1000], "from 0 to 999"),
    ("stop_token_ids", [-1], "from 0 to 999"),
    ("stop_token_ids", ["a"], "int"),
    ("stop_token_ids", [1] * (MAX_TOKEN_ENTRIES + 1), f"<= {MAX_TOKEN_ENTRIES}"),
    ("logit_bias", {"1": 101}, "from -100 to 100"),
    ("logit_bias", {"1": "x"}, "float"),
    ("logit_bias", {"-1": 1}, "from 0 to 999"),
    ("logit_bias", {"1.5": 1}, "from 0 to 999"),
    ("logit_bias", {"²": 1}, "from 0 to 999"),
    ("logit_bias", {"1" * 4301: 1}, "from 0 to 999"),
    ("logit_bias", {"0" * 4301: 1}, "from 0 to 999"),
    ("ignore_eos", "yes", "bool"),
    ("stream", "yes", "bool"),
    ("stream_options", {"include_usage": True}, "stream: true"),
    ("stream_options", 5, "object"),
    ("tools", [{"type": "function"}], "does not support"),
    ("prompt_logprobs", -1, ">= 0"),
    ("prompt_logprobs", 21, "<= 20"),
    ("prompt_logprobs", "all", "int"),
    ("truncate_prompt_tokens", -2, ">= -1"),
    ("truncate_prompt_tokens", 0, "-1, or 1 to 2048"),
    ("truncate_prompt_tokens", 2049, "-1, or 1 to 2048"),
    ("truncate_prompt_tokens", "all", "int"),
    ("truncation_side", "middle", "left|right"),
    ("prompt_embeds", "AAAA", "does not support"),
]


@pytest.mark.parametrize(("field", "value", "allowed"), COMMON)
def test_a_bad_value_is_named_with_what_is_allowed(
    server: ApiServer, field: str, value: object, allowed: str
) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "hi"},
        "/v1/chat/completions": {"messages": CHAT},
    }
    for path, body in bodies.items():
        whole = {"model": "m", "max_tokens": 8} | body | {field: value}
        message = assert_refused(server, path, whole, field, allowed)
        response = server.client.post(path, json=whole)
        assert response.json()["error"]["param"] == field, message


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/completions", {}, ["prompt"]),
        ("/v1/completions", {"prompt": 5}, ["prompt", "5"]),
        ("/v1/completions", {"prompt": [[]]}, ["prompt[0]"]),
        ("/v1/completions", {"prompt": [["a"]]}, ["prompt[0][0]"]),
        ("/v1/completions", {"prompt": [1, "a"]}, ["prompt[1]", "a token id"]),
        ("/v1/completions", {"prompt": [1, True]}, ["prompt[1]", "true"]),
        ("/v1/completions", {"prompt": ["a", 1]}, ["prompt[1]"]),
        ("/v1/completions", {"prompt": ["a", ""]}, ["prompt"]),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, ["suffix"]),
        ("/v1/completions", {"prompt": "a", "logprobs": -1}, ["logprobs", ">= 0"]),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, ["logprobs", "<= 20"]),
        (
            "/v1/completions",
            {"prompt": ["a"] * 2000},
            ["prompt", "2000", "prompts times n in one request"],
        ),
        ("/v1/chat/completions", {}, ["messages", "missing"]),
        ("/v1/chat/completions", {"messages": []}, ["messages", ">= 1"]),
        ("/v1/chat/completions", {"messages": "hi"}, ["messages", "array"]),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, ["role", "missing"]),
        ("/v1/chat/completions", {"messages": [{"role": 1}]}, ["messages[0].role", "1"]),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            ["content", "image_url", "text"],
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "narrator", "content": "x"}]},
            ["messages", "no narrators here"],
        ),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 0}, ["max_tokens", "1"]),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "max_completion_tokens": 0},
            ["max_completion_tokens"],
        ),
        ("/v1/chat/completions", {"messages": CHAT, "top_logprobs": 2}, ["top_logprobs"]),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "logprobs": True, "top_logprobs": 21},
            ["top_logprobs", "21", "<= 20"],
        ),
        ("/v1/chat/completions", {"messages": CHAT, "logprobs": 3}, ["logprobs", "bool"]),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "continue_final_message": True},
            ["continue_final_message"],
        ),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "chat_template_kwargs": {"tokenize": True}},
            ["chat_template_kwargs", "tokenize"],
        ),
        ("/tokenize", {}, ["prompt", "messages"]),
        ("/detokenize", {"tokens": [1000]}, ["tokens[0]", "from 0 to 999"]),
    ],
)
def test_a_bad_body_is_named(
    server: ApiServer, path: str, body: dict[str, Any], named: list[str]
) -> None:
    assert_refused(server, path, body, *named)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"prompt": NaN}', b'"text"', b"\xff\xfe"])
def test_a_body_that_is_no_json_object_is_refused(server: ApiServer, body: bytes) -> None:
    response = server.client.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "field",
    [
        *("prompt", "stop", "logit_bias", "tools", "seed", "unknown", "stream_options"),
        *("messages", "chat_template_kwargs"),
    ],
)
def test_a_nested_body_is_refused_however_deep_it_is(server: ApiServer, field: str) -> None:
    """Around the depth that can be read, something later gives up: a check, a message, a template."""
    given = b'"messages": [{"role": "user", "content": "a"}], "prompt": "a", "max_tokens": 1'
    for depth in (*range(850, 1010, 4), 1100, 100_000):
        value = b'{"a":' * depth + b"1" + b"}" * depth
        body = b'{%s, "%s": %s}' % (given, field.encode(), value)
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
            response = server.client.post(path, content=body)
            assert response.status_code in (200, 400), (path, depth, response.text)
    assert response.status_code == 400


def test_empty_stream_options_ask_for_nothing(server: ApiServer) -> None:
    """As in vLLM, where options that say something need stream: true."""
    assert server.complete(prompt="a", max_tokens=1, stream_options={})


@pytest.mark.parametrize("statement", ["1 // 0", "10.0 ** 1000", "'a' * -1 + 1", "[] | sum + 'a'"])
def test_whatever_a_template_raises_is_the_clients_to_know(statement: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ " + statement + " }}"
    with api_server(tokenizer=tokenizer) as server:
        assert_refused(server, "/v1/chat/completions", {"messages": CHAT}, "chat template")


def test_chats_are_rendered_off_the_event_loop(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    render = TextCodec.render_chat

    def note(codec: TextCodec, *args: Any, **kwargs: Any) -> str:
        threads.append(threading.current_thread().name)
        return render(codec, *args, **kwargs)

    monkeypatch.setattr(TextCodec, "render_chat", note)
    assert server.post("/v1/chat/completions", messages=CHAT, max_tokens=1).status_code == 200
    assert threads
    assert all(name.startswith("tokenizer") for name in threads)


def test_an_unknown_model_is_404(server: ApiServer) -> None:
    response = server.post("/v1/completions", model="other", prompt="a")
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["message"] == "The model `other` does not exist."
    assert (error["type"], error["param"], error["code"]) == ("NotFoundError", "model", 404)


def test_unknown_paths_and_methods_have_the_usual_error(server: ApiServer) -> None:
    assert server.client.get("/v1/nothing").json()["error"]["code"] == 404
    assert server.client.get("/v1/completions").json()["error"]["code"] == 405


@pytest.mark.parametrize("value", [1e400, float("nan"), 10**400, -(10**400)])
def test_a_default_beyond_all_numbers_is_passed_over(value: float) -> None:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = dict.fromkeys(names, value)
    assert read_defaults(given, frozenset(), 1000) == SamplingDefaults()
