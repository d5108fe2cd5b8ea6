"""Log-probabilities of prompts over HTTP, in vLLM's shape, against transformers' own figures."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from plimsoll_engine.config import DeviceType, EngineConfig
from plimsoll_engine.runner import build_executor
from plimsoll_engine.server.validation import SamplingDefaults
from support.engine_server import ApiServer, api_server, assert_refused, byte_tokenizer, repeat
from support.scripted_executor import ScriptedExecutor
from support.tiny_models import FAMILIES, VOCAB_SIZE, reference_model, save_tiny_model

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "How deep is she loaded, and who says so?"}]
TOKENIZER = byte_tokenizer()
# Of float32, over logits that lie tens apart.
TOLERANCE = 1e-3
# Longer than the 64 tokens of a step: computed in chunks.
PROMPTS = [random.Random(length).choices(range(VOCAB_SIZE), k=length) for length in (2, 150, 33)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(FAMILIES["llama"], tmp_path_factory.mktemp("llama"))
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[1, 2], ids=["one-rank", "two-ranks"])
def server(request: pytest.FixtureRequest, model: Path) -> Iterator[ApiServer]:
    settings: dict[str, Any] = {
        "device": DeviceType.CPU,
        "device_memory": 3 << 30,
        "tensor_parallel_size": request.param,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
    }
    executor = build_executor(EngineConfig(model=str(model), **settings))
    with api_server(
        tokenizer=TOKENIZER,
        executor=cast(ScriptedExecutor, executor),
        max_model_len=256,
        defaults=SamplingDefaults(),
        **settings,
    ) as running:
        yield running


def assert_right(model: Path, prompt: list[int], told: list[Any], num_top: int) -> None:
    """``told`` has the prompt's own tokens and the ``num_top`` most likely ones, as transformers."""
    with torch.inference_mode():
        logits = reference_model(model)(torch.tensor([prompt])).logits[0]
    expected = logits.log_softmax(-1)
    assert told[0] is None
    assert len(told) == len(prompt)
    for position, entries in enumerate(told[1:]):
        row, own = expected[position], str(prompt[position + 1])
        assert own in entries
        ranks = [entry["rank"] for key, entry in entries.items() if key != own]
        assert sorted({entries[own]["rank"], *ranks})[:num_top] == list(range(1, num_top + 1))
        assert len(entries) <= num_top + 1
        for key, entry in entries.items():
            value = float(row[int(key)])
            assert entry["logprob"] == pytest.approx(value, abs=TOLERANCE)
            # Two may be as near to each other as the two computations are.
            above, below = (int((row > value + side).sum()) for side in (TOLERANCE, -TOLERANCE))
            assert above < entry["rank"] <= below
            assert entry["decoded_token"] == TOKENIZER.decode([int(key)])


@pytest.mark.parametrize("num_top", [0, 3, 20])
def test_each_choice_of_a_completion_has_those_of_its_prompt(
    server: ApiServer, model: Path, num_top: int
) -> None:
    document = server.complete(prompt=PROMPTS, n=2, max_tokens=2, prompt_logprobs=num_top)
    assert len(document["choices"]) == 2 * len(PROMPTS)
    for choice in document["choices"]:
        assert_right(model, PROMPTS[choice["index"] // 2], choice["prompt_logprobs"], num_top)
        assert choice["logprobs"] is None


def test_a_chat_has_them_beside_its_choices(server: ApiServer, model: Path) -> None:
    prompt = server.post("/tokenize", messages=MESSAGES).json()["tokens"]
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 2, "n": 3, "prompt_logprobs": 2}
    document = server.post(CHAT, **body).json()
    assert_right(model, prompt, document["prompt_logprobs"], 2)
    assert len(document["choices"]) == 3


def test_cached_blocks_are_computed_again(server: ApiServer, model: Path) -> None:
    def cached(document: dict[str, Any]) -> int:
        found: int = document["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    prompt = PROMPTS[1]
    server.complete(prompt=prompt, max_tokens=1)
    assert cached(server.complete(prompt=prompt, max_tokens=1)) == 144
    document = server.complete(prompt=prompt, max_tokens=1, prompt_logprobs=1)
    assert cached(document) == 0
    assert_right(model, prompt, document["choices"][0]["prompt_logprobs"], 1)
    # It fills the cache for others all the same.
    assert cached(server.complete(prompt=prompt, max_tokens=1)) == 144


def test_no_token_needs_to_be_generated(server: ApiServer, model: Path) -> None:
    document = server.complete(prompt=PROMPTS[1], max_tokens=0, prompt_logprobs=1)
    (choice,) = document["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert_right(model, PROMPTS[1], choice["prompt_logprobs"], 1)
    assert document["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(("logprobs", "num_top"), [(1, 4), (4, 1)])
def test_beside_echo_each_shows_as_many_as_it_asks_for(
    server: ApiServer, model: Path, logprobs: int, num_top: int
) -> None:
    prompt = PROMPTS[2]
    body: dict[str, Any] = {"prompt": prompt, "echo": True, "logprobs": logprobs, "max_tokens": 0}
    (alone,) = server.complete(**body)["choices"]
    (both,) = server.complete(**body, prompt_logprobs=num_top)["choices"]
    assert alone["prompt_logprobs"] is None
    assert_right(model, prompt, both["prompt_logprobs"], num_top)
    assert both["logprobs"]["tokens"] == alone["logprobs"]["tokens"]
    assert both["logprobs"]["token_logprobs"] == pytest.approx(alone["logprobs"]["token_logprobs"])
    assert [set(top or ()) for top in both["logprobs"]["top_logprobs"]] == [
        set(top or ()) for top in alone["logprobs"]["top_logprobs"]
    ]


def test_those_of_a_prompt_that_was_cut_are_those_of_what_is_left(
    server: ApiServer, model: Path
) -> None:
    body: dict[str, Any] = {"prompt": PROMPTS[1], "max_tokens": 1, "prompt_logprobs": 1}
    (choice,) = server.complete(**body, truncate_prompt_tokens=70)["choices"]
    assert_right(model, PROMPTS[1][-70:], choice["prompt_logprobs"], 1)


def test_a_stream_has_none(server: ApiServer) -> None:
    """0 is what some clients send by default: as in vLLM, it asks for nothing in a stream."""
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "ab"}),
        (CHAT, {"messages": MESSAGES}),
    ]
    for path, body in asked:
        refused = body | {"stream": True, "prompt_logprobs": 1}
        assert_refused(server, path, refused, "prompt_logprobs: 1", "absent with stream: true")
        events = server.stream(path, **body, max_tokens=2, prompt_logprobs=0)
        assert events
        assert not any("prompt_logprobs" in str(event) for event in events)


def test_who_does_not_ask_gets_null() -> None:
    with api_server(repeat("ab")) as server:
        assert server.complete(prompt="a")["choices"][0]["prompt_logprobs"] is None
        assert server.post(CHAT, messages=MESSAGES).json()["prompt_logprobs"] is None


@pytest.mark.parametrize(
    ("path", "body", "figures"),
    [
        (
            "/v1/completions",
            {"prompt": [[1] * 2000] * 7, "n": 1, "prompt_logprobs": 20},
            "14000 prompt tokens x (20 + 1) x n 1",
        ),
        (
            "/v1/completions",
            {"prompt": [1] * 1500, "n": 100, "prompt_logprobs": 1},
            "1500 prompt tokens x (1 + 1) x n 100",
        ),
    ],
)
def test_they_are_bounded_in_one_request(path: str, body: dict[str, Any], figures: str) -> None:
    with api_server(repeat("ab")) as server:
        message = assert_refused(server, path, body | {"max_tokens": 1}, figures, "262144")
        assert message.startswith("prompt_logprobs: ")
        # A chat tells its prompt's once, however many choices it has.
        messages = [{"role": "user", "content": "a" * 1500}]
        chat = server.post(CHAT, messages=messages, n=100, prompt_logprobs=1, max_tokens=1)
        assert chat.status_code == 200, chat.text
