"""Chat and text completions as the OpenAI Python client and plain HTTP clients see them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from plimsoll_engine.server.validation import SamplingDefaults
from support.engine_server import (
    END,
    ApiServer,
    api_server,
    byte_tokenizer,
    parse_events,
    repeat,
    say,
    spell,
)

PIECES = [" Paris", " is", " nice"]
TOKENIZER = byte_tokenizer(PIECES)
END_ID = spell(TOKENIZER, END)[0]
ANSWER = spell(TOKENIZER, " Paris", " is", " nice")


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    """Always answers " Paris is nice" and ends."""
    with api_server(say(ANSWER, END_ID), tokenizer=TOKENIZER) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ApiServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as each:
        yield each


QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Capital of France?"}]


def test_a_chat_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="m", messages=QUESTION)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == " Paris is nice"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    # <user>Capital of France?<assistant> is 35 bytes; three pieces and the end token follow.
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (35, 4)
    assert answer.usage.total_tokens == 39


def test_a_streamed_chat_says_the_role_first_and_the_usage_last(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="m", messages=QUESTION, stream=True, stream_options={"include_usage": True}
        )
    )
    *parts, usage = chunks
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert parts[0].choices[0].delta.role == "assistant"
    assert [part.choices[0].delta.role for part in parts[1:]] == [None] * (len(parts) - 1)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == " Paris is nice"
    assert [part.choices[0].finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].choices[0].finish_reason == "stop"
    assert all(part.usage is None for part in parts)
    assert usage.choices == []
    assert usage.usage is not None
    assert (usage.usage.prompt_tokens, usage.usage.completion_tokens) == (35, 4)


def test_continuous_usage_counts_up(server: ApiServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.stream(prompt="hi", stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 4)
    assert all(event["usage"]["prompt_tokens"] == 2 for event in events)


def test_a_text_is_completed_up_to_max_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="m", prompt="France:", max_tokens=2)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == " Paris is"
    assert answer.choices[0].finish_reason == "length"


def test_a_streamed_completion_has_the_same_text(client: openai.OpenAI) -> None:
    chunks = client.completions.create(model="m", prompt="France:", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == " Paris is nice"


@pytest.mark.parametrize(
    ("prompt", "prompt_tokens"),
    [("ab", 2), (["ab", "c"], 3), ([97, 98, 99], 3), ([[97], [98, 99]], 3)],
)
def test_the_four_forms_of_a_prompt(server: ApiServer, prompt: object, prompt_tokens: int) -> None:
    document = server.complete(prompt=prompt, n=2)
    prompts = 2 if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert [choice["index"] for choice in document["choices"]] == list(range(2 * prompts))
    assert {choice["text"] for choice in document["choices"]} == {" Paris is nice"}
    assert document["usage"]["prompt_tokens"] == prompt_tokens
    assert document["usage"]["completion_tokens"] == 8 * prompts


def test_choices_of_a_stream_are_told_apart_by_index(server: ApiServer) -> None:
    events = server.stream("/v1/chat/completions", messages=QUESTION, n=3)
    for index in range(3):
        choices = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert choices[0]["delta"]["role"] == "assistant"
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == " Paris is nice"
        assert [c["finish_reason"] for c in choices][-1] == "stop"


def test_echo_puts_the_prompt_first_in_both_modes(server: ApiServer) -> None:
    whole = server.complete(prompt=["abc", "d"], echo=True)
    assert [choice["text"] for choice in whole["choices"]] == [
        "abc Paris is nice",
        "d Paris is nice",
    ]
    events = server.stream(prompt="abc", echo=True)
    assert [event["choices"][0]["text"] for event in events][:2] == ["abc", " Paris"]
    assert server.complete(prompt=[97, 98], echo=True)["choices"][0]["text"].startswith("ab ")


def test_completion_logprobs_cover_prompt_and_output(server: ApiServer) -> None:
    body: dict[str, Any] = {"prompt": "ab", "echo": True, "logprobs": 2, "max_tokens": 2}
    logprobs = server.complete(**body)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", " Paris", " is"]
    assert logprobs["text_offset"] == [0, 1, 2, 8]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(math.isfinite(value) for value in logprobs["token_logprobs"][1:])
    assert [len(top) for top in logprobs["top_logprobs"][1:]] == [2, 2, 2]

    pieces = [e["choices"][0]["logprobs"] for e in server.stream(**body)]
    joined = {key: [x for piece in pieces if piece for x in piece[key]] for key in logprobs}
    assert joined == logprobs


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="m", messages=QUESTION, logprobs=True, top_logprobs=3, max_completion_tokens=2
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [token.token for token in content] == [" Paris", " is"]
    assert content[0].bytes == list(b" Paris")
    assert [len(token.top_logprobs) for token in content] == [3, 3]
    without = client.chat.completions.create(model="m", messages=QUESTION, logprobs=True)
    assert without.choices[0].logprobs is not None
    assert without.choices[0].logprobs.content is not None
    assert without.choices[0].logprobs.content[0].top_logprobs == []


def test_no_logprobs_unless_asked_for(server: ApiServer) -> None:
    assert server.complete(prompt="a")["choices"][0]["logprobs"] is None
    assert server.complete(prompt="a", logprobs=None)["choices"][0]["logprobs"] is None


def test_text_parts_of_a_message_are_joined(server: ApiServer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    tokens = server.post("/tokenize", messages=[{"role": "user", "content": parts}]).json()
    assert server.post("/detokenize", tokens=tokens["tokens"]).json() == {
        "prompt": "<user>one\ntwo<assistant>"
    }


def test_tokenize_and_detokenize(server: ApiServer) -> None:
    document = server.post("/tokenize", prompt="hé", return_token_strs=True).json()
    assert document["count"] == 3
    assert document["tokens"] == list("hé".encode())
    assert document["token_strs"][0] == "h"
    assert document["max_model_len"] == 2048
    assert server.post("/detokenize", tokens=document["tokens"]).json() == {"prompt": "hé"}


def test_models_shows_every_name_and_the_ceiling(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["m", "alias"]
    assert {model.model_dump()["max_model_len"] for model in models} == {2048}
    assert {model.object for model in models} == {"model"}


def test_models_have_the_permission_that_vllm_gives(client: openai.OpenAI) -> None:
    (permission,) = client.models.list().data[0].model_dump()["permission"]
    assert permission.pop("id").startswith("modelperm-")
    assert permission.pop("created") > 0
    assert permission == {
        "object": "model_permission",
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }


def test_the_answer_carries_the_name_that_was_asked_for(server: ApiServer) -> None:
    assert server.complete(model="alias", prompt="a")["model"] == "alias"


def test_a_request_id_of_the_client_is_in_the_answer(server: ApiServer) -> None:
    body = {"model": "m", "prompt": "a"}
    answer = server.client.post("/v1/completions", json=body, headers={"x-request-id": "seven"})
    assert answer.json()["id"] == "cmpl-seven"


def test_small_endpoints(server: ApiServer) -> None:
    get = server.client.get
    assert (get("/health").status_code, get("/health").content) == (200, b"")
    assert get("/ping").status_code == 200
    assert server.client.post("/ping").status_code == 200
    assert get("/load").json() == {"server_load": 0}
    assert get("/version").json() == {"version": "0.1.0"}


def test_unknown_fields_are_ignored(server: ApiServer) -> None:
    assert server.complete(prompt="a", no_such_field=1, user="me")["choices"]


def test_null_means_not_given(server: ApiServer) -> None:
    names = "max_tokens temperature top_p n stop seed logit_bias stream tools response_format "
    names += "logprobs echo stop_token_ids min_tokens"
    nothing = dict.fromkeys(names.split())
    assert server.complete(prompt="a", **nothing)["choices"][0]["text"] == " Paris is nice"


def test_a_stop_token_ends_the_text_before_itself(server: ApiServer) -> None:
    nice = ANSWER[2]
    choice = server.complete(prompt="a", stop_token_ids=[nice])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (" Paris is", "stop")
    assert choice["stop_reason"] == nice
    shown = server.complete(prompt="a", stop_token_ids=[nice], include_stop_str_in_output=True)
    assert shown["choices"][0]["text"] == " Paris is nice"


def test_ignore_eos_goes_on_to_max_tokens(server: ApiServer) -> None:
    choice = server.complete(prompt="a", ignore_eos=True, max_tokens=9)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (" Paris is nice", "length")
    text = server.complete(prompt="a", ignore_eos=True, max_tokens=5, skip_special_tokens=False)[
        "choices"
    ][0]["text"]
    assert text == f" Paris is nice{END}{END}"


def test_max_tokens_of_a_chat_defaults_to_all_the_room() -> None:
    with api_server(repeat("ab"), max_model_len=64) as server:
        choice = server.post(
            "/v1/chat/completions", model="m", messages=[{"role": "u", "content": "x"}]
        ).json()
        # <u>x<assistant> is 15 tokens.
        assert choice["usage"]["completion_tokens"] == 64 - 15
        assert choice["choices"][0]["finish_reason"] == "length"


def test_the_models_own_sampling_defaults_are_used_and_overridden() -> None:
    defaults = SamplingDefaults(temperature=0.25, top_k=7, eos_token_ids=frozenset({END_ID}))
    with api_server(say(ANSWER, END_ID), tokenizer=TOKENIZER, defaults=defaults) as server:
        server.complete(prompt="a")
        server.complete(prompt="a", temperature=0, top_k=-1, seed=5, n=2)
        chunks = [chunk for batch in server.executor.batches for chunk in batch.chunks]
        used = {chunk.request_id: chunk.sampling for chunk in chunks if chunk.sampling}
        first, second, third = used.values()
        assert (first.temperature, first.top_k) == (0.25, 7)
        assert (second.temperature, second.top_k) == (0, None)
        # Choices with a seed are reproducible and not all the same.
        assert (second.seed, third.seed) == (5, 6)


def test_log_probabilities_of_a_whole_answer_are_bounded(server: ApiServer) -> None:
    body = {"model": "m", "n": 64, "max_tokens": 1000}
    text = server.post("/v1/completions", prompt="a", logprobs=20, **body)
    chat = server.post(
        "/v1/chat/completions",
        messages=[{"role": "u", "content": "x"}],
        logprobs=True,
        top_logprobs=20,
        **body,
    )
    for response, param in ((text, "logprobs"), (chat, "top_logprobs")):
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert "may have 1344000: 1000 max_tokens x (20 + 1) x 64" in error["message"]
    # The bound of a token is vLLM's default of --max-logprobs.
    assert server.post("/v1/completions", model="m", prompt="a", logprobs=21).status_code == 400


def test_every_answer_has_the_id_of_its_request(server: ApiServer) -> None:
    given = {"x-request-id": "mine-1"}
    for response in (
        server.client.get("/health", headers=given),
        server.client.post("/v1/completions", content=b"{", headers=given),
    ):
        assert response.headers["x-request-id"] == "mine-1"
    made = [server.client.get("/version").headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2
    answer = server.post("/v1/completions", model="m", prompt="a")
    assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"
    refused = server.client.get("/v1/models", headers={"x-request-id": "x" * 257})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Request-Id")


def test_http_requests_are_counted_as_vllm_does(server: ApiServer) -> None:
    def counted(method: str, status: str, handler: str) -> float:
        labels = f'{{handler="{handler}",method="{method}",status="{status}"}}'
        return server.metrics().get(f"http_requests_total{labels}", 0)

    before = counted("POST", "4xx", "/v1/completions"), counted("GET", "4xx", "none")
    server.client.post("/v1/completions", content=b"{")
    server.client.get("/nothing/here")
    server.client.get("/health")
    after = counted("POST", "4xx", "/v1/completions"), counted("GET", "4xx", "none")
    assert after == (before[0] + 1, before[1] + 1)
    assert counted("GET", "2xx", "/health") == 0


def test_usage_is_told_as_the_flags_say() -> None:
    with api_server(
        repeat("ab"), enable_force_include_usage=True, enable_prompt_tokens_details=False
    ) as server:
        *_, last = server.stream(prompt="abc", max_tokens=2)
        assert last["choices"] == []
        assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_the_api_key_guards_v1_alone() -> None:
    with api_server(say(ANSWER, END_ID), tokenizer=TOKENIZER, api_key="secret") as server:
        refused = server.client.get("/v1/models")
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == 401
        wrong = {"authorization": "Bearer secre"}
        assert server.client.get("/v1/models", headers=wrong).status_code == 401
        assert server.client.get("/health").status_code == 200
        assert server.client.get("/metrics").status_code == 200
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret") as client:
            assert client.completions.create(model="m", prompt="a").choices[0].text


def test_an_error_after_the_headers_is_an_event_and_then_done(server: ApiServer) -> None:
    def fail(request_id: str, position: int) -> int:
        if position == 2:
            raise RuntimeError("scripted")
        return ord("a")

    with api_server(fail) as failing:
        body = {"model": "m", "prompt": "x", "stream": True}
        response = failing.client.post("/v1/completions", json=body)
        assert response.status_code == 200
        *_, last = parse_events(response.text)
        assert last["error"]["code"] == 500
        assert "scripted" in last["error"]["message"]
        # The core has died: the process would end now.
        assert failing.client.get("/health").status_code == 503
        assert failing.post("/v1/completions", model="m", prompt="x").status_code == 503
