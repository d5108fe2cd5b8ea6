"""The real asynchronous openai client: many streams at once, and streams that it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import openai
import pytest

from support.engine_server import ApiServer, Pace, api_server, repeat

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with api_server(repeat(LETTERS), before_step=Pace(0.002)) as running:
        yield running


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as each:
        yield each


async def say(client: openai.AsyncOpenAI, num_tokens: int) -> str:
    stream = await client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=num_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    async for chunk in stream:
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert usage is not None
    assert usage.completion_tokens == num_tokens
    return text


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came so far")


def is_free(server: ApiServer) -> bool:
    return server.core.snapshot().used_blocks == server.service.load == 0


async def test_streams_at_once_each_get_their_own_text(client: openai.AsyncOpenAI) -> None:
    texts = await asyncio.gather(*(say(client, count) for count in range(1, 21)))
    assert texts == [LETTERS[:count] for count in range(1, 21)]


async def test_a_task_that_is_cancelled_takes_its_request_along(
    server: ApiServer, client: openai.AsyncOpenAI
) -> None:
    task = asyncio.create_task(say(client, 1500))
    await until(lambda: server.core.snapshot().running > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: is_free(server))
    assert await say(client, 3) == "abc"


async def test_a_stream_that_is_closed_early_frees_its_blocks(
    server: ApiServer, client: openai.AsyncOpenAI
) -> None:
    stream = await client.completions.create(model="m", prompt="hi", max_tokens=1500, stream=True)
    async for chunk in stream:
        assert chunk.choices[0].text == "a"
        break
    await stream.close()
    await until(lambda: is_free(server))


async def test_errors_are_the_clients_own(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model="m", prompt="hi", max_tokens=100_000)
    assert bad.value.param == "input_tokens"
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="other", prompt="hi")
