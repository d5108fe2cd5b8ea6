"""The engine's real HTTP server over the real core and a scripted executor, on a loopback port.

The tokenizer is made here: one token per byte, then whole pieces that only a script emits, then an
end token.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from plimsoll_engine.config import EngineConfig
from plimsoll_engine.core import EngineCore
from plimsoll_engine.executor import StepBatch
from plimsoll_engine.grammar import GrammarCompiler
from plimsoll_engine.metrics import EngineMetrics
from plimsoll_engine.models.tokenizer import ModelTokenizer
from plimsoll_engine.server.answers import UsageShown
from plimsoll_engine.server.api_keys import read_api_keys
from plimsoll_engine.server.app import build_app
from plimsoll_engine.server.body import BodyBounds
from plimsoll_engine.server.connections import ConnectionBounds
from plimsoll_engine.server.grammars import MAX_WAITING, GrammarReader
from plimsoll_engine.server.listener import HttpServer, bind
from plimsoll_engine.server.service import ServedModel, Service
from plimsoll_engine.server.text import TextCodec
from plimsoll_engine.server.validation import SamplingDefaults
from support.scripted_executor import Script, ScriptedExecutor, figures

END = "<|end|>"
BEGIN = "<|begin|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'narrator' %}{{ raise_exception('no narrators here') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(
    pieces: Sequence[str] = (), *, adds_begin_token: bool = False
) -> PreTrainedTokenizerFast:
    """Ids: 0 to 255 the bytes in their order, then ``pieces`` in theirs, then END and BEGIN."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = [bytes_to_symbol(byte) for byte in range(256)]
    symbols = [byte_level.pre_tokenize_str(piece)[0][0] for piece in pieces]
    # A piece of one byte is that byte's token.
    distinct = dict.fromkeys(alphabet + symbols)
    vocabulary = {symbol: number for number, symbol in enumerate(distinct)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True), AddedToken(BEGIN, special=True)])
    if adds_begin_token:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
        )
    build: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    return build(tokenizer_object=tokenizer, eos_token=END, chat_template=CHAT_TEMPLATE)


def bytes_to_symbol(byte: int) -> str:
    """GPT-2's printable stand-in of a byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [each for each in range(256) if each not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))


def spell(tokenizer: PreTrainedTokenizerFast, *pieces: str) -> list[int]:
    """Token ids: a piece that is a token of its own as that, any other byte by byte."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core = tokenizer.backend_tokenizer
    ids: list[int] = []
    for piece in pieces:
        symbol = piece if piece in (END, BEGIN) else byte_level.pre_tokenize_str(piece)[0][0]
        token_id = core.token_to_id(symbol)
        ids += piece.encode() if token_id is None else [token_id]
    return ids


def repeat(text: str) -> Script:
    """A script that says the text, letter by letter, again and again."""
    letters = text.encode()
    return lambda request_id, position: letters[position % len(letters)]


def say(token_ids: Sequence[int], end: int) -> Script:
    """A script that says the tokens and then the end token."""
    return lambda request_id, position: token_ids[position] if position < len(token_ids) else end


class Pace:
    """A ``before_step`` that slows steps down to a few milliseconds until ``release``."""

    def __init__(self, seconds: float = 0.005) -> None:
        self._seconds = seconds
        self._released = threading.Event()

    def __call__(self, batch: StepBatch) -> None:
        self._released.wait(self._seconds)

    def release(self) -> None:
        self._released.set()


@dataclass(frozen=True)
class ApiServer:
    url: str
    core: EngineCore
    executor: ScriptedExecutor
    service: Service
    app: Starlette
    client: httpx.Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def complete(self, **body: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", **({"model": "m"} | body))
        assert response.status_code == 200, response.text
        document: dict[str, Any] = response.json()
        return document

    def stream(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        """The events of a whole stream; it must end with [DONE]."""
        with self.client.stream(
            "POST", path, json={"model": "m", "stream": True} | body
        ) as response:
            response.read()
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return parse_events(response.text)

    def metrics(self) -> dict[str, float]:
        """Sample with its labels (model_name and engine left out) -> value."""
        return parse_metrics(self.client.get("/metrics").text)


def assert_refused(server: ApiServer, path: str, body: dict[str, Any], *named: str) -> str:
    """HTTP 400 in the usual shape; each of ``named`` is in the message. Returns the message."""
    response = server.client.post(path, json=body)
    assert response.status_code == 400, (body, response.text)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("BadRequestError", 400)
    for text in named:
        assert text in error["message"], (text, error["message"])
    assert server.client.get("/health").status_code == 200
    message: str = error["message"]
    return message


def parse_events(text: str) -> list[dict[str, Any]]:
    lines = text.strip().split("\n\n")
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def parse_metrics(page: str) -> dict[str, float]:
    values = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = [
                f'{label}="{value}"'
                for label, value in sorted(sample.labels.items())
                if label not in ("model_name", "engine")
            ]
            name = sample.name
            if labels:
                name += "{" + ",".join(labels) + "}"
            values[name] = sample.value
    return values


@contextmanager
def api_server(
    script: Script | None = None,
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    num_blocks: int = 160,
    before_step: Callable[[StepBatch], None] | None = None,
    api_key: str | None = None,
    max_model_len: int | None = 2048,
    executor: ScriptedExecutor | None = None,
    defaults: SamplingDefaults | None = None,
    body_bounds: BodyBounds | None = None,
    connection_bounds: ConnectionBounds | None = None,
    grammar_compiler: GrammarCompiler | None = None,
    max_waiting_grammars: int = MAX_WAITING,
    **settings: Any,
) -> Iterator[ApiServer]:
    """The model is named ``m``. Its vocabulary has 1000 entries (ScriptedExecutor)."""
    tokenizer = tokenizer or byte_tokenizer()
    (end,) = spell(tokenizer, END)
    executor = executor or ScriptedExecutor(
        script or repeat("abcdefghijklmnopqrstuvwxyz "),
        memory_figures=figures(num_blocks),
        before_step=before_step,
    )
    config = EngineConfig(model="m", max_model_len=max_model_len, api_key=api_key, **settings)
    metrics = EngineMetrics("m")
    core = EngineCore(config, executor, observer=metrics)
    core.start()
    metrics.expose(core.snapshot)
    snapshot = core.snapshot()
    codec = TextCodec(tokenizer)
    model = ServedModel(
        ("m", "alias"),
        "m",
        vocab_size=snapshot.model.vocab_size,
        ceiling=snapshot.ceiling,
        defaults=defaults or SamplingDefaults(eos_token_ids=frozenset({end})),
    )
    ends = model.defaults.eos_token_ids
    compiler = grammar_compiler or GrammarCompiler(lambda: ModelTokenizer(tokenizer, ends))
    grammars = GrammarReader(
        compiler, vocab_size=model.vocab_size, has_end=bool(ends), max_waiting=max_waiting_grammars
    )
    service = Service(
        core,
        codec,
        metrics,
        model,
        grammars,
        max_sequences=config.max_num_seqs + config.max_num_queued_reqs,
        usage=UsageShown(config.enable_prompt_tokens_details, config.enable_force_include_usage),
        body_bounds=body_bounds or BodyBounds(),
    )
    listener = bind("127.0.0.1", 0)
    # Clients may connect at once; uvicorn takes them as soon as it runs.
    listener.listen()
    app = build_app(service, api_keys=read_api_keys(config))
    server = HttpServer(app, connection_bounds)
    thread = threading.Thread(target=asyncio.run, args=(server.serve(sockets=[listener]),))
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with httpx.Client(base_url=url, timeout=30) as client:
            yield ApiServer(url, core, executor, service, app, client)
    finally:
        core.stop()
        server.should_exit = True
        thread.join(10)
        codec.close()
        grammars.close()
    assert not thread.is_alive()
