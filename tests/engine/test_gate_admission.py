"""The gate admits by the engine's policy: each refusal, the queue, the long lane, moving limits."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from plimsoll_engine.gate.app import CHAT, COMPLETION
from plimsoll_engine.limits import Limits, LimitsOutcome
from support.gate_harness import Harness, Upstream, open_gate, until


async def refused(
    task: asyncio.Task[tuple[int, dict[str, dict[str, object]]]],
) -> dict[str, object]:
    status, document = await task
    assert document["error"]["code"] == status
    return document["error"]


def rejected(harness: Harness) -> dict[str, int]:
    return {reason.value: count for reason, count in harness.gate.refused.items() if count}


async def test_over_the_ceiling_is_a_400_in_vllms_words() -> None:
    async with open_gate() as harness:
        error = await refused(harness.complete([1] * 995, 6))
        assert (error["code"], error["type"]) == (400, "BadRequestError")
        assert error["param"] == "input_tokens"
        assert str(error["message"]).startswith(
            "This model's maximum context length is 1000 tokens. However, you requested 6 output"
        )
        assert rejected(harness) == {"too_long": 1}
        assert harness.upstream.held.empty()


async def test_the_ceiling_is_the_smaller_of_the_flag_and_the_upstreams() -> None:
    async with open_gate(max_model_len=800) as harness:
        assert (await refused(harness.complete([1] * 800, 1)))["code"] == 400
    async with open_gate(max_model_len=5000) as harness:
        assert (await refused(harness.complete([1] * 1000, 1)))["code"] == 400


async def test_over_the_admitted_length_is_a_429_that_passes_when_the_limit_moves_back() -> None:
    async with open_gate() as harness:
        assert (
            harness.gate.set_limits(1, Limits(max_model_len=500)).outcome is LimitsOutcome.APPLIED
        )
        body = {"model": "m", "prompt": [1] * 495, "max_tokens": 6}
        async with harness.client.post(harness.url + COMPLETION, json=body) as answer:
            assert answer.status == 429
            assert int(answer.headers["Retry-After"]) >= 1
            assert (await answer.json())["error"]["type"] == "RateLimitError"
        assert rejected(harness) == {"over_admitted_length": 1}
        harness.gate.set_limits(2, Limits(max_model_len=501))
        served = harness.complete([1] * 495, 6)
        (await harness.next()).answer_json()
        assert (await served)[0] == 200


async def test_limits_that_move_leave_a_stream_in_flight_alone() -> None:
    go_on = asyncio.Event()

    async def send(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(http)
        await response.write(b"data: 1\n\n")
        await go_on.wait()
        await response.write(b"data: 2\n\n")
        return response

    async with open_gate(Upstream(send=send)) as harness:
        body = {"prompt": [1] * 900, "max_tokens": 100, "stream": True}
        async with harness.client.post(harness.url + COMPLETION, json=body) as answer:
            assert await answer.content.readany() == b"data: 1\n\n"
            limits = Limits(max_model_len=10, max_num_seqs=1)
            assert harness.gate.set_limits(1, limits).outcome is LimitsOutcome.APPLIED
            assert (await refused(harness.complete([1] * 10, 1)))["code"] == 429
            go_on.set()
            assert await answer.content.read() == b"data: 2\n\n"


async def test_what_finds_no_place_waits_in_order_and_above_the_queue_is_a_429() -> None:
    async with open_gate(max_num_seqs=1, max_num_queued_reqs=2) as harness:
        running, second, third = (harness.complete([each], 1) for each in (1, 2, 3))
        await until(lambda: harness.gate.running == 1 and harness.gate.waiting == 2)
        error = await refused(harness.complete([4], 1))
        assert error["code"] == 429
        assert "The queue is full" in str(error["message"])
        assert rejected(harness) == {"queue_full": 1}
        order = []
        for task in (running, second, third):
            held = await harness.next()
            order.append(held.document["prompt"])
            held.answer_json()
            assert (await task)[0] == 200
        assert sorted(order) == [[1], [2], [3]]


async def test_the_queue_is_bounded_in_tokens_too() -> None:
    async with open_gate(max_num_seqs=1, max_num_queued_tokens=100) as harness:
        tasks = [harness.complete([1], 1), harness.complete([2] * 60, 1)]
        await until(lambda: harness.gate.waiting == 1)
        assert (await refused(harness.complete([3] * 41, 1)))["code"] == 429
        tasks.append(harness.complete([4] * 40, 1))
        for _ in tasks:
            (await harness.next()).answer_json()
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200, 200, 200]


async def test_a_wider_limit_starts_those_that_wait() -> None:
    async with open_gate(max_num_seqs=4) as harness:
        harness.gate.set_limits(1, Limits(max_num_seqs=1))
        tasks = [harness.complete([each], 1) for each in range(3)]
        await until(lambda: harness.gate.waiting == 2)
        harness.gate.set_limits(2, Limits(max_num_seqs=3))
        for _ in tasks:
            (await harness.next()).answer_json()
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200, 200, 200]


async def test_more_sequences_than_ever_fit_are_a_400_and_cost_nothing() -> None:
    async with open_gate(max_num_seqs=4, max_num_queued_reqs=4) as harness:
        error = await refused(harness.complete([1], 1, n=10**9))
        assert (error["code"], error["param"]) == (400, "n")
        assert rejected(harness) == {"too_many_sequences": 1}


async def test_long_prompts_keep_to_their_lane_and_short_ones_overtake() -> None:
    # The upstream's cache has 1600 tokens: half of it has room for one prompt of 500, not for two.
    async with open_gate(long_prompt_tokens=100, long_prompt_share=0.5) as harness:
        first = harness.complete([1] * 500, 1)
        held_first = await harness.next()
        second = harness.complete([2] * 500, 1)
        await until(lambda: harness.gate.waiting == 1)
        short = harness.complete([3] * 100, 1)
        (await harness.next()).answer_json()
        assert (await short)[0] == 200
        assert not second.done()
        held_first.answer_json()
        assert (await first)[0] == 200
        (await harness.next()).answer_json()
        assert (await second)[0] == 200


async def test_long_prompts_that_wait_have_a_bound_that_moves() -> None:
    # A quarter of 1600 tokens may wait.
    async with open_gate(
        long_prompt_tokens=100, long_prompt_share=0.5, long_queue_share=0.25
    ) as harness:
        first = harness.complete([1] * 500, 1)
        held_first = await harness.next()
        second = harness.complete([2] * 500, 1)
        await until(lambda: harness.gate.waiting == 1)
        # 300 tokens of the second would find room in the lane, 200 wait.
        error = await refused(harness.complete([3] * 201, 1))
        assert error["code"] == 429
        assert "Long prompts of 200 tokens are waiting, 400 may" in str(error["message"])
        assert rejected(harness) == {"long_queue_full": 1}
        harness.gate.set_limits(1, Limits(long_queue_share=0.9))
        third = harness.complete([3] * 201, 1)
        await until(lambda: harness.gate.waiting == 2)
        held_first.answer_json()
        for _ in (second, third):
            (await harness.next()).answer_json()
        answers = await asyncio.gather(first, second, third)
        assert [status for status, _ in answers] == [200, 200, 200]


async def test_the_cheap_bound_spares_the_count_of_short_texts() -> None:
    async with open_gate() as harness:
        task = harness.complete("short text", 10)
        (await harness.next()).answer_json()
        assert (await task)[0] == 200
        assert harness.upstream.questions == []
        long = harness.complete("x" * 985, 10)
        (await harness.next()).answer_json()
        assert (await long)[0] == 200
        asked = [each["prompt"] for each in harness.upstream.questions]
        assert asked == ["x" * 985]


async def test_a_text_that_may_be_long_is_counted_and_may_turn_out_short() -> None:
    async with open_gate(Upstream(count=lambda asked: 50), long_prompt_tokens=100) as harness:
        for text, questions, long in (("x" * 150, 1, 0), ("y" * 90, 1, 0), ([1] * 101, 1, 1)):
            task = harness.complete(text, 10)
            held = await harness.next()
            assert len(harness.upstream.questions) == questions
            assert harness.gate.long_running == long
            held.answer_json()
            assert (await task)[0] == 200


async def test_text_that_may_grow_when_normalised_is_counted() -> None:
    async with open_gate(Upstream(count=lambda asked: 999)) as harness:
        assert (await refused(harness.complete("\ufdfa" * 40, 10)))["code"] == 400


async def test_a_chat_without_a_limit_of_output_gets_one_when_the_length_is_lowered() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "top_p": 0.5}
    async with open_gate(Upstream(count=lambda asked: 30)) as harness:
        task = asyncio.create_task(harness.post(CHAT, body))
        held = await harness.next()
        # At the upstream's own length its own default is the right one.
        assert held.body == json.dumps(body).encode()
        held.answer_json()
        await task
        harness.gate.set_limits(1, Limits(max_model_len=200))
        task = asyncio.create_task(harness.post(CHAT, body))
        held = await harness.next()
        assert held.document == body | {"max_completion_tokens": 170}
        held.answer_json()
        assert (await task)[0] == 200
        assert harness.upstream.questions[-1]["messages"] == body["messages"]


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        (COMPLETION, b"{", 400, "not JSON"),
        (COMPLETION, b"[]", 400, "not allowed"),
        (COMPLETION, b'{"prompt": "x", "max_tokens": "9"}', 400, "max_tokens"),
        (COMPLETION, b'{"prompt": "x", "max_tokens": -1}', 400, "max_tokens"),
        (COMPLETION, b'{"prompt": []}', 400, "prompt"),
        (COMPLETION, b'{"prompt": [[1], true]}', 400, "prompt"),
        (COMPLETION, b'{"prompt_embeds": "AAAA", "prompt": "x"}', 400, "prompt_embeds"),
        (COMPLETION, b'{"prompt": "x", "n": 0}', 400, "n`"),
        (CHAT, b'{"messages": "hi"}', 400, "messages"),
        (CHAT, b"[" * 100_000, 400, "not"),
        ("/v1/responses", b"{}", 404, "not served"),
        ("/collective_rpc", b"{}", 404, "not served"),
        ("/health", b"{}", 405, "POST is not allowed"),
    ],
)
async def test_what_cannot_be_judged_is_refused(
    path: str, body: bytes, status: int, told: str
) -> None:
    async with open_gate() as harness:
        async with harness.client.post(harness.url + path, data=body) as answer:
            assert answer.status == status
            assert told in (await answer.json())["error"]["message"]
        assert harness.upstream.held.empty()


async def test_bodies_are_bounded_announced_or_not() -> None:
    async def endless() -> object:
        for _ in range(100):
            yield b"x" * 1000

    async with open_gate(max_body=2000) as harness:
        for data in (b"x" * 2001, endless()):
            async with harness.client.post(harness.url + COMPLETION, data=data) as answer:
                assert answer.status == 413


async def test_a_compressed_body_is_refused() -> None:
    async with open_gate() as harness:
        headers = {"Content-Encoding": "br"}
        async with harness.client.post(
            harness.url + COMPLETION, data=b"{}", headers=headers
        ) as answer:
            assert answer.status in (400, 415)
        assert harness.upstream.held.empty()


async def test_the_key_is_asked_for_before_anything_else() -> None:
    async with open_gate(api_key="secret") as harness:
        status, document = await harness.post(COMPLETION, {"prompt": "x"})
        assert (status, document["error"]["type"]) == (401, "AuthenticationError")
        headers = {"Authorization": "Bearer secret"}
        task = asyncio.create_task(harness.post(COMPLETION, {"prompt": "x"}, headers=headers))
        held = await harness.next()
        assert ("Authorization", "Bearer secret") in held.headers
        held.answer_json()
        assert (await task)[0] == 200
