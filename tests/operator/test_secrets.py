"""A secret that an engine, a server or an exception says aloud is in no status, Event, log or metric."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plimsoll_operator import cluster as api
from plimsoll_operator.cli.explain import explain
from plimsoll_operator.cli.view import read_view
from plimsoll_operator.controller import Controller, Options
from plimsoll_operator.credentials import make_credentials
from plimsoll_operator.desired.control_secret import build_control_secret
from plimsoll_operator.redaction import RedactingFilter, redact
from plimsoll_operator.spec import Deployment
from plimsoll_operator.telemetry import Telemetry
from plimsoll_operator.tuning.values import Unknown, UnknownReason
from plimsoll_operator.workers import Key
from support.memory_cluster import MemoryCluster, SilentEngines
from support.resources import NOW, llmdeployment, time

KEY = Key("default", "assistant")
WORDS = st.text(
    "abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ0123456789-_", min_size=16, max_size=40
)
SECRETS = st.one_of(WORDS, WORDS.map("hf_{}".format), WORDS.map("sk-{}".format))
# In whose words a secret has been seen.
SAYINGS = (
    "Authorization: Bearer {}",
    "non-default args: {{'model': 'm', 'api_key': ['{}'], 'port': 8000}}",
    'request failed: {{"token": "{}"}}',
    "HF_TOKEN={} is not allowed to read org/model",
    "vllm: error: unrecognized arguments: --api-key {}",
    "cannot fetch https://reader:{}@hub.example/org/model",
)


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Every line of the log, at any level."""
    found: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(self.format(record))

    keeper, ours = Keeper(), logging.getLogger("plimsoll_operator")
    before = ours.level
    keeper.addFilter(RedactingFilter())
    ours.addHandler(keeper)
    ours.setLevel(logging.DEBUG)
    yield found
    ours.removeHandler(keeper)
    ours.setLevel(before)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(secret=SECRETS, saying=st.sampled_from(SAYINGS), in_json=st.booleans(), broken=st.booleans())
def test_a_planted_secret_shows_nowhere(
    lines: list[str], secret: str, saying: str, in_json: bool, broken: bool
) -> None:
    lines.clear()
    said = saying.format(secret)
    document = json.dumps({"class": "ModelLoadFailed", "phase": "load", "message": said})
    end = {
        "exitCode": 1,
        "reason": "Error",
        "message": document if in_json else f"Traceback\n{said}",
        "startedAt": time(NOW - 50),
        "finishedAt": time(NOW - 10),
    }
    reference = {"name": "keys", "key": "key"}
    resource = llmdeployment(
        model={"uri": "hf://org/tiny", "tokenSecretRef": reference}, apiKeySecretRef=reference
    )
    cluster = MemoryCluster(
        resource, ready=False, waiting={"reason": "CrashLoopBackOff"}, last_terminated=end
    )
    credentials = make_credentials("assistant", NOW)
    control = build_control_secret(Deployment.parse(resource), credentials)
    keys = {"data": {"key": base64.b64encode(secret.encode()).decode()}}
    asyncio.run(cluster.apply(control))
    cluster._children["Secret", "keys"] = keys
    telemetry = Telemetry()
    engines = SilentEngines(Unknown(UnknownReason.UNREACHABLE, "assistant-0", said))
    controller = Controller(Options(), engines, telemetry)
    controller._cluster = cluster

    async def passes() -> None:
        for _ in range(4):
            await controller._pass(KEY)
        if broken:
            try:
                raise RuntimeError(said)
            except RuntimeError as error:
                logging.getLogger("plimsoll_operator.workers").warning("%s", error, exc_info=True)
            await controller._show(cluster, api.LLM_DEPLOYMENT, KEY, RuntimeError(said))

    asyncio.run(passes())
    status = cluster.resource["status"]
    assert status["failures"]["last"]["class"] in (
        "ModelLoadFailed",
        "EngineDead",
        "InvalidConfiguration",
    )
    assert cluster.events
    assert lines
    view = read_view(cluster.resource)
    shown = [
        json.dumps(status),
        json.dumps(cluster.events),
        "\n".join(lines),
        telemetry.page().decode(),
        repr(explain(view, None, None, NOW)),
    ]
    for text in shown:
        assert secret not in text
        for private in (credentials.token, credentials.key):
            assert private.decode() not in text


@pytest.mark.parametrize(
    "text",
    [
        "max_num_batched_tokens: 512, max seq len (131072) is larger than 41392 tokens",
        "KV cache per token 12345678 bytes",
        "the bearer token is missing or wrong",
        "Secret assistant-control: an apply is accepted and changes nothing at data.tls.crt",
        "cannot reach http://10.0.0.7:8000/metrics",
    ],
)
def test_other_words_stay(text: str) -> None:
    assert redact(text) == text
