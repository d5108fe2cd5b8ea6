"""The burst's client against a scripted engine: one account per arrival, whatever happens."""

import pytest

from plimsoll_local.demo.client import Endpoint, Progress, ask, play, read_retry_after
from plimsoll_local.demo.outcomes import Account, Outcome
from plimsoll_local.demo.traffic import Arrival, Kind
from support.fake_engine import (
    Answer,
    Behaviour,
    Break,
    Drop,
    EndEarly,
    FakeEngine,
    Refuse,
    TooLong,
)

ARRIVAL = Arrival(number=1, at_s=0.0, kind=Kind.SHORT, prompt_tokens=64, output_tokens=16)


async def play_one(script: list[Behaviour], patience: float = 30.0) -> tuple[Account, FakeEngine]:
    progress = Progress(total=1)
    async with FakeEngine(script) as engine:
        endpoint = Endpoint(f"{engine.url}/v1", "fake")
        (account,) = await play(
            [ARRIVAL], ["hello"], endpoint, progress, patience_after_burst_s=patience
        )
    assert progress.accounts == [account]
    assert (progress.sent, progress.refusals) == (1, account.refusals)
    return account, engine


async def test_an_answer_has_a_time_to_its_first_token() -> None:
    account, engine = await play_one([Answer()])
    assert account.outcome is Outcome.ANSWERED
    assert account.first_token_s is not None
    assert 0 < account.first_token_s <= account.total_s
    assert engine.seen[0]["max_tokens"] == 16
    assert engine.seen[0]["ignore_eos"] is True


async def test_a_429_is_tried_again_and_counted() -> None:
    account, engine = await play_one([Refuse(), Refuse(), Answer()])
    assert (account.outcome, account.refusals) == (Outcome.ANSWERED, 2)
    assert len(engine.seen) == 3


async def test_a_429_beyond_the_patience_is_given_up() -> None:
    account, engine = await play_one([Refuse(retry_after="60")], patience=1.0)
    assert (account.outcome, account.refusals) == (Outcome.GAVE_UP, 1)
    assert len(engine.seen) == 1


@pytest.mark.parametrize(
    ("behaviour", "outcome", "detail"),
    [
        (TooLong(), Outcome.REFUSED, "maximum context length"),
        (Break(), Outcome.FAILED, "InternalServerError"),
        (Drop(chunks=2), Outcome.FAILED, ""),
        (EndEarly(), Outcome.FAILED, "StreamEndedEarly"),
    ],
)
async def test_the_rest_is_final(behaviour: Behaviour, outcome: Outcome, detail: str) -> None:
    account, engine = await play_one([behaviour, Answer()])
    assert account.outcome is outcome
    assert account.detail is not None
    assert detail in account.detail
    assert len(engine.seen) == 1


async def test_an_answer_that_does_not_come_is_a_failure() -> None:
    account, _ = await play_one([Answer(delay_s=30)], patience=0.2)
    assert account.outcome is Outcome.FAILED
    assert account.detail == "no answer within the client's patience"


async def test_nobody_listening_is_a_failure() -> None:
    async with FakeEngine() as engine:
        closed = Endpoint(f"{engine.url}/v1", "fake")
    (account,) = await play([ARRIVAL], ["hello"], closed, Progress(total=1))
    assert account.outcome is Outcome.FAILED


async def test_ask_returns_the_text() -> None:
    async with FakeEngine([Answer("The capital of France is Paris.")]) as engine:
        answer = await ask(Endpoint(f"{engine.url}/v1", "fake"), "What is the capital of France?")
    assert answer == "The capital of France is Paris."


@pytest.mark.parametrize(
    ("header", "seconds"), [(None, 1.0), ("3", 3.0), ("0", 0.0), ("-5", 0.0), ("soon", 1.0)]
)
def test_retry_after(header: str | None, seconds: float) -> None:
    assert read_retry_after(header) == seconds
