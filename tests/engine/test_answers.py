"""Framing of answers where the server tests cannot look: faults of our own inside a stream."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest

from plimsoll_engine.executor import TokenLogprob
from plimsoll_engine.server.answers import CompletionAnswer
from plimsoll_engine.server.generation import ChoiceDelta
from plimsoll_engine.server.protocol import CompletionRequest
from plimsoll_engine.server.text import Prompt
from support.engine_server import parse_events


async def one_delta() -> AsyncIterator[ChoiceDelta]:
    yield ChoiceDelta(0, "a", ((TokenLogprob(1, float("-inf"), 1),),), (), 1, None, None)


def token_text(token_id: int) -> str:
    raise RuntimeError("a bug")


def answer(token_text: object) -> CompletionAnswer:
    return CompletionAnswer(
        CompletionRequest(prompt="x", logprobs=1),
        answer_id="cmpl-1",
        model="m",
        prompts=[Prompt((120,), "x")],
        token_text=token_text,
    )


async def test_a_fault_of_ours_ends_a_stream_with_an_error_and_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events = b"".join([event async for event in answer(token_text).events(one_delta())])
    (error,) = parse_events(events.decode())
    assert error["error"]["code"] == 500
    assert "a bug" not in error["error"]["message"]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


async def test_an_impossible_token_has_a_finite_logprob() -> None:
    events = b"".join([event async for event in answer(str).events(one_delta())])
    (first,) = parse_events(events.decode())
    assert first["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]
