"""The OpenAPI document: it is what the engine does, and the engine does no more than it says."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import given
from hypothesis import strategies as st
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.result import Ok
from starlette.routing import Route

from plimsoll_engine.server.app import DOCUMENT_PATH, build_operations
from plimsoll_engine.server.errors import ApiError
from plimsoll_engine.server.protocol import (
    REFUSED_FIELDS,
    ChatRequest,
    CompletionRequest,
    parse_request,
)
from support.engine_server import ApiServer, api_server
from support.fuzzing import fuzz_settings

# What each answer must be, as schemathesis names it. Whether an odd header or method is refused,
# and whether every body that fits the document is served, is not asked: a prompt may be too long.
load_all_checks()
ASKED: Any = CHECKS.get_by_names(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
        "unsupported_method",
    ]
)
EXAMPLES = {"/v1/chat/completions": 60, "/v1/completions": 60, "/tokenize": 20, "/detokenize": 20}


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    # Whatever is asked for, an answer is short.
    with api_server(max_model_len=64) as running:
        yield running


@pytest.fixture(scope="module")
def document(server: ApiServer) -> dict[str, Any]:
    response = server.client.get(DOCUMENT_PATH)
    assert response.headers["content-type"] == "application/json"
    found: dict[str, Any] = response.json()
    return found


def test_every_route_is_in_the_document_and_nothing_else(
    server: ApiServer, document: dict[str, Any]
) -> None:
    routed = {
        (route.path, method.lower())
        for route in server.app.routes
        if isinstance(route, Route) and route.path != DOCUMENT_PATH
        for method in (route.methods or set()) - {"HEAD"}
    }
    described = {(path, method) for path, each in document["paths"].items() for method in each}
    assert described == routed


def test_a_handler_takes_and_gives_what_its_operation_says(server: ApiServer) -> None:
    for operation in build_operations(server.service):
        hints = typing.get_type_hints(operation.handle)
        given_back = hints.pop("return")
        assert operation.body in hints.values(), operation.path
        if operation.answer is not None:
            assert operation.answer in (given_back, *typing.get_args(given_back)), operation.path


def test_a_request_is_described_by_the_type_that_reads_it(document: dict[str, Any]) -> None:
    """Field by field: what the document allows and forbids is what the reader does."""
    schema = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert set(schema) == set(CompletionRequest.__struct_fields__)
    numbers = {
        name: limits
        for name, field in schema.items()
        for limits in field.get("anyOf", ())
        if {"minimum", "maximum"} <= limits.keys()
    }
    assert {"n", "temperature", "min_p", "logprobs", "seed"} <= numbers.keys()
    for name, limits in numbers.items():
        for key, step in (("minimum", -1), ("maximum", 1)):
            parse_request(json.dumps({name: limits[key]}).encode(), CompletionRequest)
            with pytest.raises(ApiError, match=name):
                parse_request(json.dumps({name: limits[key] + step}).encode(), CompletionRequest)


@pytest.mark.parametrize("name", REFUSED_FIELDS)
def test_what_is_refused_is_described_as_such(document: dict[str, Any], name: str) -> None:
    for kind in (ChatRequest, CompletionRequest):
        allowed = document["components"]["schemas"][kind.__name__]["properties"][name]["enum"]
        assert allowed == [None, *REFUSED_FIELDS[name]]
        assert name in kind.__struct_fields__


def test_keys_are_described_where_they_are_asked_for() -> None:
    with api_server(api_key="secret") as server:
        document = server.client.get(DOCUMENT_PATH).json()
    assert document["components"]["securitySchemes"] == {
        "key": {"type": "http", "scheme": "bearer"}
    }
    asked = {
        path for path, each in document["paths"].items() for op in each.values() if "security" in op
    }
    assert asked == {"/v1/chat/completions", "/v1/completions", "/v1/models"}


def test_the_engine_does_what_its_document_says(server: ApiServer) -> None:
    schema = schemathesis.openapi.from_url(server.url + DOCUMENT_PATH)
    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()

        @fuzz_settings(EXAMPLES.get(operation.path, 3))
        @given(
            case=st.one_of(
                operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE),
                operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE),
            )
        )
        def ask(case: schemathesis.Case[Any]) -> None:
            case.call_and_validate(checks=ASKED)

        ask()
    assert server.client.get("/health").status_code == 200
    assert server.core.failure is None
