"""The clients of a soak (soak.py): each sends one request after the other, and compares what comes.

In: a connection to the engine and the report. Out: faults in the report. ``over`` ends them after the request that
they are at.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx2 as httpx

from support.soak_report import Report
from support.soak_requests import BROKEN, Reference, compose, describe, text_of, write_text

PROMPTS = 32
# Two tokens this close may change places with the order of a float32 sum: such prompts are not used.
LEAST_LEAD = 1e-4


class Clients:
    """They share a connection pool, the prompts and one source of randomness."""

    def __init__(self, client: httpx.AsyncClient, report: Report, chance: random.Random) -> None:
        self._client, self._report, self._random = client, report, chance
        self._references: list[Reference] = []
        self.over = False

    async def make_references(self, count: int) -> None:
        """What each prompt gives alone, with nothing found in the cache. Half of them begin alike,
        some are chats, some are long."""
        chance = self._random
        shared = write_text(chance, 400)
        while len(self._references) < count:
            length = chance.choice([chance.randint(1, 60), chance.randint(60, 600), 1500])
            text = write_text(chance, length)
            if chance.random() < 0.5:
                text = shared[: chance.randint(1, 400)] + text[: 1 + length // 4]
            message = text if chance.random() < 0.4 else None
            prompt = text if message is None else f"user: {message}\nassistant: "
            body = {
                "prompt": prompt,
                "max_tokens": chance.randint(1, 60),
                "logprobs": 2,
                "cache_salt": f"reference {len(self._references)}",
            }
            answer = (await self._post("/v1/completions", body)).json()["choices"][0]
            leads = []
            for alternatives in answer["logprobs"]["top_logprobs"]:
                first, second = sorted(alternatives.values())[-2:][::-1]
                leads.append(first - second)
            if min(leads) > LEAST_LEAD:
                self._references.append(Reference(prompt, answer["text"], message))

    async def be_client(self) -> None:
        chance = self._random
        while not self.over:
            reference = chance.choice(self._references)
            body, path, expected = compose(chance, reference)
            received: list[str] = []
            request = self._exchange(path, body, expected, received)
            if chance.random() < 0.3:
                # At any moment: before a byte is sent, while it waits, in prefill, in decode.
                patience = chance.choice([0.0, 0.01, 0.1, 1.0, 1.0]) * chance.random()
                try:
                    await asyncio.wait_for(request, patience)
                except TimeoutError:
                    self._report.cancelled["begun" if received else "not begun"] += 1
            else:
                await request

    async def _exchange(
        self, path: str, body: dict[str, Any], expected: str, received: list[str]
    ) -> None:
        """Sends, reads and judges one request. What has come is in ``received``, too."""
        texts: Counter[int] = Counter()
        answer = dict.fromkeys(range(body.get("n", 1)), "")
        document = {"model": "m", "temperature": 0, "ignore_eos": True} | body
        finished = 0
        async with self._client.stream("POST", path, json=document) as response:
            self._report.statuses[response.status_code] += 1
            if response.status_code != 200:
                await response.aread()
                await self._judge_refusal(response, document)
                return
            if not body.get("stream"):
                await response.aread()
                choices = response.json()["choices"]
                for choice in choices:
                    answer[choice["index"]] = text_of(choice)
                    finished += choice["finish_reason"] in ("stop", "length")
            else:
                ended = False
                async for line in response.aiter_lines():
                    if not line:
                        continue
                    received.append(line)
                    payload = line.removeprefix("data: ")
                    if payload == "[DONE]":
                        ended = True
                        continue
                    event = json.loads(payload)
                    if "error" in event:
                        self._report.fault(f"{describe(document)}: {event}")
                        return
                    for choice in event["choices"]:
                        answer[choice["index"]] += text_of(choice)
                        texts[choice["index"]] += 1
                        finished += choice["finish_reason"] in ("stop", "length")
                    # While it runs it says what it is to say, and nothing else.
                    if not all(expected.startswith(text) for text in answer.values()):
                        break
                if not ended and all(expected.startswith(text) for text in answer.values()):
                    self._report.fault(f"{describe(document)}: the stream has no [DONE]")
                    return
        wrong = [text for text in answer.values() if text != expected]
        if wrong:
            self._report.fault(f"{describe(document)}: {wrong[0]!r}, alone {expected!r}")
        elif finished != len(answer):
            self._report.fault(f"{describe(document)}: {finished} of {len(answer)} choices ended")
        kind = "chat" if "messages" in body else "text"
        traits = [name for name in ("stream", "n", "stop", "logprobs", "echo") if name in body]
        self._report.answered[kind] += 1
        self._report.answered.update(traits)

    async def _judge_refusal(self, response: httpx.Response, document: dict[str, Any]) -> None:
        """Too much at once, or too long for the limits of the moment: both pass, and say so."""
        if response.status_code == 429 and "retry-after" in response.headers:
            # Not quite so long: it is to be a load.
            await asyncio.sleep(0.1)
        else:
            self._report.fault(f"{describe(document)}: {response.status_code} {response.text}")

    async def send_broken(self) -> None:
        while not self.over:
            status, path, content = self._random.choice(BROKEN)
            response = await self._client.post(path, content=content)
            self._report.statuses[response.status_code] += 1
            if response.status_code != status:
                self._report.fault(f"{content!r}: {response.status_code}, expected {status}")
            await asyncio.sleep(self._random.uniform(0.2, 2))

    async def ask_again(self) -> None:
        """One prompt after the other, as at first."""
        for reference in self._references:
            body = {"prompt": reference.prompt, "max_tokens": len(reference.answer)}
            answer = (await self._post("/v1/completions", body)).json()["choices"][0]["text"]
            if answer != reference.answer:
                self._report.fault(f"after all: {answer!r}, at first {reference.answer!r}")

    async def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        document = {"model": "m", "temperature": 0, "ignore_eos": True} | body
        response = await self._client.post(path, json=document)
        if response.status_code != 200:
            raise RuntimeError(f"{describe(document)}: {response.status_code} {response.text}")
        return response
