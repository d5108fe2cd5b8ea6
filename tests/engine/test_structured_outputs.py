"""Outputs that follow a schema, a regular expression or a choice, and forms that are refused."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import openai
import pytest
import torch

from plimsoll_engine.config import DeviceType, EngineConfig
from plimsoll_engine.executor import SampledToken, SequenceChunk, StepBatch
from plimsoll_engine.grammar import GrammarCompiler, GrammarMatchers, forbid_others
from plimsoll_engine.model_runner import ModelRunner
from plimsoll_engine.models.tokenizer import ModelTokenizer, load_tokenizer
from plimsoll_engine.reports import FinishReason
from plimsoll_engine.runner import build_executor
from plimsoll_engine.sampling_params import Grammar, SamplingParams
from plimsoll_engine.server.errors import ApiError
from plimsoll_engine.server.protocol import CompletionRequest
from plimsoll_engine.server.structured import MAX_GRAMMAR_BYTES, read_form
from plimsoll_engine.server.validation import SamplingDefaults
from support.engine_server import END, ApiServer, api_server, byte_tokenizer, repeat, spell
from support.loop_harness import LoopHarness
from support.scripted_executor import ScriptedExecutor, figures
from support.tiny_model import write_tiny_model

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "capital": {"type": "boolean"},
        "rank": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["city", "capital", "rank"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A random model: without a grammar it says nothing that anyone would take for JSON."""
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=48, num_layers=1)
    config = EngineConfig(
        model=str(folder), device=DeviceType.CPU, max_num_batched_tokens=128, max_num_seqs=16
    )
    loaded = load_tokenizer(config)
    with api_server(
        tokenizer=cast(Any, loaded.tokenizer),
        executor=cast(ScriptedExecutor, ModelRunner(config, "cpu")),
        defaults=SamplingDefaults(eos_token_ids=loaded.eos_token_ids),
        max_num_batched_tokens=128,
        max_num_seqs=16,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ApiServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as each:
        yield each


def check_city(text: str | None) -> None:
    answer = json.loads(text or "")
    assert set(answer) == {"city", "capital", "rank"}
    assert answer["city"] in ("Paris", "Rome")
    assert isinstance(answer["capital"], bool)
    assert 1 <= answer["rank"] <= 99


def test_a_chat_follows_a_json_schema_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "Which city?"}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "city", "strict": True, "schema": SCHEMA},
        },
        "max_tokens": 500,
        "temperature": 1.0,
        "seed": 1,
    }
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].finish_reason == "stop"
    check_city(answer.choices[0].message.content)
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**asked, stream=True)
    ]
    assert "".join(pieces) == answer.choices[0].message.content


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}, "[0-9]{3}-[a-f]{2}"),
        ({"guided_regex": "(ab|cd){2}"}, "(ab|cd){2}"),
        ({"response_format": {"type": "regex", "regex": "x{1,4}"}}, "x{1,4}"),
        ({"structured_outputs": {"choice": ['a "quoted" one', "zwei"]}}, 'a "quoted" one|zwei'),
        ({"guided_grammar": 'start: "yes" | "no"'}, "yes|no"),
        (
            {"structured_outputs": {"json": {"const": [1]}, "disable_any_whitespace": True}},
            r"\[1\]",
        ),
        (
            {"structured_outputs": {"json": {"const": [1]}, "whitespace_pattern": "_"}},
            r"\[_?1_?\]",
        ),
        # Nothing else may follow there, whatever is asked for beside.
        ({"guided_choice": ["yes", "no"], "min_tokens": 20, "logit_bias": {"10": 100}}, "yes|no"),
    ],
)
def test_a_text_follows_other_forms_beside_requests_that_are_free(
    server: ApiServer, asked: dict[str, Any], pattern: str
) -> None:
    body = {"prompt": ["one", "two"], "n": 2, "max_tokens": 40, "temperature": 1.5, "seed": 3}
    for choice in server.complete(**body, **asked)["choices"]:
        assert re.fullmatch(pattern, choice["text"]), choice
        assert choice["finish_reason"] == "stop"


def test_an_error_names_the_field_and_the_engine_lives_on(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "x"}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "bad", "schema": {"type": "nothing"}},
            },
        )
    assert refused.value.param == "response_format"
    assert "nothing" in str(refused.value)
    assert client.completions.create(model="m", prompt="x", max_tokens=1).choices


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
            "response_format",
        ),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"guided_json": {"$ref": "#/missing"}}, "guided_json"),
        ({"guided_json": {"$ref": "http://127.0.0.1/schema"}}, "guided_json"),
        ({"guided_json": {"enum": ["x" * MAX_GRAMMAR_BYTES]}}, "guided_json"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs",
        ),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": 1}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_by_name(asked: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_form(CompletionRequest(prompt="x", **asked), has_end=True)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert param in refused.value.message


def test_a_model_without_an_end_token_keeps_to_no_grammar() -> None:
    with pytest.raises(ApiError, match="guided_regex: this model has no end token"):
        read_form(CompletionRequest(prompt="x", guided_regex="a"), has_end=False)


@pytest.mark.parametrize("asked", [{}, {"response_format": {"type": "text"}}])
def test_no_form_is_no_grammar(asked: dict[str, Any]) -> None:
    assert read_form(CompletionRequest(prompt="x", **asked), has_end=True) is None


def test_a_grammar_without_an_end_goes_on_to_max_tokens(server: ApiServer) -> None:
    endless = 'start: LETTER start\nLETTER: "a" | "b"'
    (choice,) = server.complete(prompt="x", max_tokens=30, guided_grammar=endless)["choices"]
    assert re.fullmatch("[ab]{30}", choice["text"])
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    "asked",
    [
        {"guided_grammar": "start: A\nA: /[ab]+/ & /c+/"},
        {"guided_grammar": 'start: "ab" start'},
        {"guided_json": {"$ref": "#"}},
    ],
)
def test_a_grammar_that_cannot_go_on_ends_its_request_alone(
    server: ApiServer, asked: dict[str, Any]
) -> None:
    failed = server.post("/v1/completions", prompt="x", max_tokens=30, **asked)
    assert failed.status_code == 500
    assert "grammar cannot go on" in failed.json()["error"]["message"]
    assert server.complete(prompt="x", max_tokens=2)["choices"][0]["finish_reason"]


def never() -> ModelTokenizer:
    raise AssertionError("a step compiles nothing")


def compile_regex(pattern: str) -> Grammar:
    """As the server does, before the request is submitted."""
    tokenizer = byte_tokenizer()
    loaded = ModelTokenizer(tokenizer, frozenset(spell(tokenizer, END)))
    form = read_form(CompletionRequest(guided_regex=pattern), has_end=True)
    assert form is not None
    return Grammar(form.text, GrammarCompiler(lambda: loaded).compile(form.text, 300))


def test_a_matcher_that_was_dropped_is_made_again_from_the_output() -> None:
    params = SamplingParams(max_tokens=9, grammar=compile_regex("ab|cd"))
    matchers = GrammarMatchers(GrammarCompiler(never), capacity=1)

    def possible(request_id: str, output: bytes) -> list[int]:
        # More rows than the tokenizer has tokens: those are impossible too.
        logits = torch.zeros(1, 300)
        chunk = SequenceChunk(request_id, (1,), 0, (0,), params, output_token_ids=tuple(output))
        allowed = matchers.find_allowed([chunk], 300)
        assert not allowed.errors
        forbid_others(logits, [allowed.tokens[request_id]])
        ids: list[int] = logits[0].isfinite().nonzero()[:, 0].tolist()
        return ids

    assert possible("one", b"") == [ord("a"), ord("c")]
    assert possible("two", b"c") == [ord("d")]
    assert possible("one", b"a") == [ord("b")]
    assert possible("one", b"ab") == spell(byte_tokenizer(), END)
    # Preempted, and begun again from its first token.
    assert possible("one", b"") == [ord("a"), ord("c")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_grammar_that_is_compiled_for_long_holds_nobody_up(ranks: int, tmp_path: Path) -> None:
    """Neither other streams nor the tokenizer wait; too many of them are told to come again."""
    tokenizer, begun, go_on = byte_tokenizer(), threading.Event(), threading.Event()

    def load_slowly() -> ModelTokenizer:
        begun.set()
        assert go_on.wait(20)
        return ModelTokenizer(tokenizer, frozenset(spell(tokenizer, END)))

    form = {"prompt": "x", "max_tokens": 3, "guided_regex": "abc"}
    settings: dict[str, Any] = {"max_num_batched_tokens": 128, "max_num_seqs": 16}
    executor = ScriptedExecutor(repeat("abc"), memory_figures=figures(160))
    if ranks > 1:
        # Without the tokenizer that a rank would need to compile anything.
        folder = write_tiny_model(tmp_path, hidden_size=48, num_layers=1, num_kv_heads=2)
        for file in folder.glob("tokenizer*"):
            file.unlink()
        settings |= {"device": DeviceType.CPU, "tensor_parallel_size": ranks}
        settings |= {"device_memory": 3 << 30}
        executor = cast(
            ScriptedExecutor, build_executor(EngineConfig(model=str(folder), **settings))
        )
    with (
        api_server(
            grammar_compiler=GrammarCompiler(load_slowly),
            max_waiting_grammars=1,
            executor=executor,
            **settings,
        ) as server,
        ThreadPoolExecutor(1) as clients,
    ):
        slow = clients.submit(server.post, "/v1/completions", **form)
        try:
            assert begun.wait(20)
            # Sixty steps, and a text that becomes tokens.
            other = server.complete(prompt="other", max_tokens=60, ignore_eos=True)
            assert other["usage"]["completion_tokens"] == 60
            late = server.post("/v1/completions", **form)
            assert (late.status_code, late.headers["retry-after"]) == (429, "1")
            assert not slow.done()
        finally:
            go_on.set()
        assert slow.result(20).json()["choices"][0]["text"] == "abc"
        assert server.complete(**form)["choices"][0]["text"] == "abc"


def test_a_token_that_the_model_does_not_have_is_refused_by_name() -> None:
    with api_server() as server:
        refused = server.post("/v1/completions", prompt="x", guided_grammar="start: <|none|>")
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == "guided_grammar"
    assert "<|none|>" in refused.json()["error"]["message"]


def test_a_request_whose_grammar_fails_ends_alone() -> None:
    harness = LoopHarness()
    execute = harness.executor.execute

    def fail_one(batch: StepBatch) -> list[SampledToken]:
        return [
            SampledToken(each.request_id, each.token_id, error="too costly")
            if each.request_id == "bad"
            else each
            for each in execute(batch)
        ]

    harness.executor.execute = fail_one  # type: ignore[method-assign]
    harness.submit("bad", 5, 5)
    harness.submit("good", 5, 5)
    harness.run()
    assert harness.final("bad").finish_reason is FinishReason.ERROR
    assert harness.final("bad").error == "too costly"
    assert harness.final("good").finish_reason is FinishReason.LENGTH
    assert harness.loop.snapshot().used_blocks == 0
