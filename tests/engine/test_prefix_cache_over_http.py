"""The prefix cache as a client and a scraper see it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.engine_server import ApiServer, api_server, parse_events, repeat

# One byte is one token here; blocks have 16.
PROMPT = "Once upon a time there was a ship that knew how deep she was loaded."


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with api_server(repeat("ab")) as running:
        yield running


def complete(server: ApiServer, **body: Any) -> Any:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 4, **body}
    return server.client.post("/v1/completions", json=body)


def cached_tokens(server: ApiServer, **body: Any) -> int:
    response = complete(server, **body)
    assert response.status_code == 200, response.text
    cached: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_usage_tells_what_was_found(server: ApiServer) -> None:
    assert len(PROMPT) == 68
    assert cached_tokens(server) == 0
    assert cached_tokens(server) == 64
    assert cached_tokens(server, prompt=PROMPT[:40]) == 32
    assert cached_tokens(server, prompt=[PROMPT, PROMPT[:40]], n=2) == 64 + 32


def test_a_stream_tells_it_in_its_usage(server: ApiServer) -> None:
    complete(server)
    body = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = parse_events(complete(server, **body).text)
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}


def test_a_chat_finds_the_turns_before_it(server: ApiServer) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    body = {"model": "m", "messages": messages, "max_tokens": 4}
    first = server.client.post("/v1/chat/completions", json=body).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    second = server.client.post("/v1/chat/completions", json=body).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


def test_under_another_salt_nothing_is_found(server: ApiServer) -> None:
    assert cached_tokens(server, cache_salt="mine") == 0
    assert cached_tokens(server, cache_salt="yours") == 0
    assert cached_tokens(server) == 0
    assert cached_tokens(server, cache_salt="mine") == 64


@pytest.mark.parametrize("salt", ["", 5, "x" * 257])
def test_a_bad_salt_is_refused_by_name(server: ApiServer, salt: object) -> None:
    response = complete(server, cache_salt=salt)
    assert response.status_code == 400
    assert "cache_salt" in response.json()["error"]["message"]


@pytest.mark.parametrize(("caching", "hits"), [(True, 64), (False, 0)])
def test_the_metrics_count_tokens_and_name_the_setting(caching: bool, hits: int) -> None:
    with api_server(repeat("ab"), enable_prefix_caching=caching) as server:
        complete(server)
        complete(server)
        values = server.metrics()
        page = server.client.get("/metrics").text
    assert values["vllm:prefix_cache_queries_total"] == (136 if caching else 0)
    assert values["vllm:prefix_cache_hits_total"] == hits
    assert values["vllm:prompt_tokens_cached_total"] == hits
    assert values["vllm:prompt_tokens_total"] == 136
    assert values["vllm:kv_cache_usage_perc"] == 0
    (info,) = (
        sample
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "vllm:cache_config_info"
    )
    assert info.labels["enable_prefix_caching"] == str(caching)
