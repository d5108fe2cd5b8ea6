"""The gate before a real engine server with vLLM's API: Plimsoll's own, with a scripted model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from plimsoll_engine.gate.app import CHAT, COMPLETION
from plimsoll_engine.limits import Limits
from support.engine_server import Pace, api_server, repeat
from support.gate_harness import open_gate

# The template adds <user> and <assistant>.
ADDED = len("<user><assistant>")


async def test_counts_are_the_engines_and_streams_are_its_own() -> None:
    with api_server(repeat("ab")) as server:
        async with open_gate(at=server.url) as harness:
            ceiling = harness.gate.ceiling
            assert ceiling == server.core.snapshot().ceiling
            harness.gate.set_limits(1, Limits(max_model_len=600))
            text = "x" * (600 - ADDED - 20)
            chat: dict[str, Any] = {
                "model": "m",
                "messages": [{"role": "user", "content": text}],
                "max_completion_tokens": 21,
            }
            status, document = await harness.post(CHAT, chat)
            assert status == 429
            assert f"{600 - 20} input and 21 output" in document["error"]["message"]
            status, document = await harness.post(CHAT, chat | {"max_completion_tokens": 20})
            assert (status, document["usage"]["prompt_tokens"]) == (200, 580)
            # Without a limit of output it ends where the admitted length does.
            open_ended = {**chat, "ignore_eos": True}
            del open_ended["max_completion_tokens"]
            status, document = await harness.post(CHAT, open_ended)
            assert (status, document["usage"]["total_tokens"]) == (200, 600)

            stream = {"model": "m", "prompt": "hi", "max_tokens": 20, "stream": True, "seed": 1}
            async with harness.client.post(harness.url + COMPLETION, json=stream) as answer:
                lines = (await answer.text()).split("\n\n")
            assert lines[-2:] == ["data: [DONE]", ""]
            texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-2]]
            assert "".join(texts) == "ab" * 10


async def test_a_client_that_leaves_frees_the_engine() -> None:
    with api_server(repeat("ab"), before_step=Pace(0.002)) as server:
        async with open_gate(at=server.url) as harness:
            endless = {
                "model": "m",
                "prompt": "x",
                "max_tokens": 2000,
                "ignore_eos": True,
                "stream": True,
            }
            answer = await harness.client.post(harness.url + COMPLETION, json=endless)
            await answer.content.readany()
            answer.close()
            assert await harness.gate.drain(20)
            assert await asyncio.to_thread(server.core.drain, 20)
            assert server.core.snapshot().running == 0
            aborted = 'vllm:request_success_total{finished_reason="abort"}'
            assert server.metrics()[aborted] == 1
