"""Plays a burst against one OpenAI endpoint and keeps account of every arrival.

In:  arrivals with their user messages, a base URL, the served model's name.
Out: one Account per arrival, in the order of arrival, and the accounts so far for the live view.

The client behaves as a patient user would, and says so in the account:
  429              waits as long as Retry-After says and asks again, until its patience is over.
  400              is final.
  lost connection, 5xx, a stream that ends early
                   is a failure and is not tried again: hiding it behind a retry would hide what the
                   burst did to users.

Knows nothing of Kubernetes.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx2
import openai

from plimsoll_local.demo.outcomes import Account, Outcome
from plimsoll_local.demo.traffic import Arrival

# How long after the end of the burst a client still waits for its answer. Far longer than two free
# cores need, so that a slow machine makes the demo late and not wrong.
PATIENCE_AFTER_BURST_S = 300.0
DEFAULT_RETRY_AFTER_S = 1.0


class StreamEndedEarly(Exception):
    """The server closed a stream without a finish reason."""


@dataclass
class Progress:
    """What the client has seen so far; read by the live view while it changes."""

    total: int
    sent: int = 0
    accounts: list[Account] = field(default_factory=list)
    refusals: int = 0

    def count(self, outcome: Outcome) -> int:
        return sum(account.outcome is outcome for account in self.accounts)


@dataclass(frozen=True)
class Endpoint:
    """Where to send: an OpenAI base URL (ending in /v1) and the model name it serves."""

    base_url: str
    model: str


async def play(
    arrivals: Sequence[Arrival],
    messages: Sequence[str],
    endpoint: Endpoint,
    progress: Progress,
    *,
    patience_after_burst_s: float = PATIENCE_AFTER_BURST_S,
) -> tuple[Account, ...]:
    """Sends every arrival at its time, all concurrently, and returns their accounts."""
    started = time.monotonic()
    give_up_at = started + max(arrival.at_s for arrival in arrivals) + patience_after_burst_s
    async with _connect(endpoint.base_url) as client:
        tasks = [
            asyncio.create_task(
                _follow(client, endpoint.model, arrival, message, started, give_up_at, progress)
            )
            for arrival, message in zip(arrivals, messages, strict=True)
        ]
        return tuple(await asyncio.gather(*tasks))


async def ask(endpoint: Endpoint, question: str, *, max_tokens: int = 32) -> str:
    """The greedy answer to one question. Raises openai.OpenAIError as the client library does."""
    async with _connect(endpoint.base_url) as client:
        completion = await client.chat.completions.create(
            model=endpoint.model,
            messages=[{"role": "user", "content": question}],
            max_tokens=max_tokens,
            temperature=0,
        )
    return completion.choices[0].message.content or ""


def _connect(base_url: str) -> openai.AsyncOpenAI:
    # The library would retry 429s and lost connections by itself, uncounted.
    return openai.AsyncOpenAI(
        base_url=base_url, api_key="not-needed", max_retries=0, timeout=openai.Timeout(600)
    )


async def _follow(
    client: openai.AsyncOpenAI,
    model: str,
    arrival: Arrival,
    message: str,
    started: float,
    give_up_at: float,
    progress: Progress,
) -> Account:
    """One arrival from its time to its end."""
    due = started + arrival.at_s
    await asyncio.sleep(max(0.0, due - time.monotonic()))
    progress.sent += 1
    refusals = 0
    first_token_at: float | None = None

    def note_first_token() -> None:
        nonlocal first_token_at
        first_token_at = first_token_at or time.monotonic()

    def close(outcome: Outcome, detail: str | None = None) -> Account:
        account = Account(
            arrival=arrival,
            outcome=outcome,
            total_s=time.monotonic() - due,
            first_token_s=first_token_at - due if first_token_at else None,
            refusals=refusals,
            detail=detail,
        )
        progress.accounts.append(account)
        return account

    while True:
        try:
            async with asyncio.timeout(max(0.0, give_up_at - time.monotonic())):
                await _stream(client, model, arrival, message, note_first_token)
            return close(Outcome.ANSWERED)
        except openai.RateLimitError as error:
            refusals += 1
            progress.refusals += 1
            wait = read_retry_after(error.response.headers.get("retry-after"))
            if time.monotonic() + wait >= give_up_at:
                return close(Outcome.GAVE_UP, str(error))
            await asyncio.sleep(wait)
        except openai.BadRequestError as error:
            return close(Outcome.REFUSED, str(error))
        except TimeoutError:
            outcome = Outcome.GAVE_UP if refusals else Outcome.FAILED
            return close(outcome, "no answer within the client's patience")
        except (openai.OpenAIError, httpx2.HTTPError, StreamEndedEarly) as error:
            # The library passes on a connection lost in mid-stream as httpx raised it.
            return close(Outcome.FAILED, f"{type(error).__name__}: {error}")


async def _stream(
    client: openai.AsyncOpenAI,
    model: str,
    arrival: Arrival,
    message: str,
    note_first_token: Callable[[], None],
) -> None:
    # ignore_eos makes both deployments generate the same number of tokens, whatever they say.
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": message}],
        max_tokens=arrival.output_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    finished = False
    async with stream:
        async for chunk in stream:
            for choice in chunk.choices:
                if choice.delta.content:
                    note_first_token()
                finished = finished or choice.finish_reason in ("stop", "length")
    if not finished:
        raise StreamEndedEarly("the stream ended without a finish reason")


def read_retry_after(header: str | None) -> float:
    """Seconds to wait by a Retry-After header in seconds; one second when it says nothing usable."""
    try:
        return max(0.0, float(header)) if header is not None else DEFAULT_RETRY_AFTER_S
    except ValueError:
        return DEFAULT_RETRY_AFTER_S
