"""The connection to the upstream: what it is asked, and requests relayed to it byte for byte.

In: the upstream's address and clients' requests. Out: its answers, chunk by chunk as they come, or
an ApiError when there is none. Knows HTTP and nothing of admission.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Self

import aiohttp
import msgspec
from aiohttp import hdrs, web
from multidict import CIMultiDict
from yarl import URL

from plimsoll_engine.gate.upstream_state import (
    UnreadableAnswer,
    UpstreamState,
    read_metrics,
    read_models,
)
from plimsoll_engine.server.errors import ApiError

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
# For the upstream's word on itself. A page of metrics waits for nothing in vLLM.
QUESTION_SECONDS = 5.0
# Counting a prompt of 100,000s of tokens takes vLLM seconds, and it has a queue for it.
COUNT_SECONDS = 120.0
# vLLM closes an idle connection after 5 s: it must not be taken up again at that moment.
IDLE_SECONDS = 3.0
MAX_ANSWER = 64 * 1024**2

_JSON = {"Content-Type": "application/json"}
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# Made anew for the upstream's connection.
_OF_THIS_CONNECTION = frozenset({"host", "content-length", "expect"})


class _Error(msgspec.Struct):
    message: str
    param: str | None = None


class _Tokenized(msgspec.Struct):
    """The token ids in it, which may be 100,000s, are passed over."""

    count: Annotated[int, msgspec.Meta(ge=0)] | None = None
    error: _Error | None = None


_TOKENIZED = msgspec.json.Decoder(_Tokenized)


class Upstream:
    """Use within its own ``async with``."""

    def __init__(self, base: str, *, api_key: str | None = None) -> None:
        self._base = base
        self._own_headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            # Admission bounds the requests, not the connector.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open_session().close()

    async def is_healthy(self) -> bool:
        try:
            status, _ = await self._ask("GET", "/health")
        except ApiError:
            return False
        return status == 200

    async def observe(self) -> UpstreamState | None:
        """None when it does not answer, or not as vLLM does."""
        try:
            models = read_models(await self._page("/v1/models"))
            metrics = read_metrics(await self.metrics_page())
            return UpstreamState(models, metrics, await self._version())
        except (ApiError, UnreadableAnswer) as error:
            log.info("the upstream's state is unknown: %s", error)
            return None

    async def metrics_page(self) -> str:
        """In the Prometheus text format. Raises ApiError."""
        page = await self._page("/metrics")
        return page.decode("utf-8", "replace")

    async def count(self, question: Mapping[str, Any], headers: Mapping[str, str]) -> int:
        """Tokens of a prompt by /tokenize, asked with the client's own authorization.

        Raises ApiError: the upstream's own one where it refuses the prompt, else 502 or 503.
        """
        given = {key: headers[key] for key in ("Authorization",) if key in headers}
        status, body = await self._ask(
            "POST", "/tokenize", question=question, headers=given, seconds=COUNT_SECONDS
        )
        try:
            answer = _TOKENIZED.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            answer = _Tokenized()
        if status == 200 and answer.count is not None:
            return answer.count
        if 400 <= status < 500 and answer.error is not None:
            raise ApiError(status, answer.error.message, param=answer.error.param)
        raise ApiError(502, f"The upstream did not count the prompt: /tokenize answered {status}.")

    async def relay(
        self, http: web.BaseRequest, path: str, body: bytes | None
    ) -> web.StreamResponse:
        """Sends the request on to ``path`` and the answer back. Raises ApiError when no answer
        begins; when one breaks off, so does the client's connection."""
        query = http.rel_url.raw_query_string
        url = URL(f"{self._base}{path}{'?' if query else ''}{query}", encoded=True)
        headers = _forwarded(http.headers, _OF_THIS_CONNECTION)
        try:
            answer = await self._open_session().request(
                http.method, url, headers=headers, data=body, allow_redirects=False
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _no_answer(error) from None
        async with answer:
            response = web.StreamResponse(
                status=answer.status,
                reason=answer.reason,
                headers=_forwarded(answer.headers),
            )
            try:
                await response.prepare(http)
                await _pass_on(answer.content, response, http)
                await response.write_eof()
            except ConnectionError:
                log.info("%s %s: the client has left", http.method, http.path)
            return response

    async def _version(self) -> str | None:
        try:
            version = json.loads(await self._page("/version"))["version"]
        except (ApiError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return version if isinstance(version, str) else None

    async def _page(self, path: str) -> bytes:
        status, body = await self._ask("GET", path)
        if status != 200:
            raise ApiError(502, f"The upstream answered {path} with {status}.")
        return body

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        question: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        seconds: float = QUESTION_SECONDS,
    ) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        try:
            async with self._open_session().request(
                method,
                self._base + path,
                data=None if question is None else msgspec.json.encode(question),
                headers={**_JSON, **self._own_headers, **(headers or {})},
                timeout=timeout,
                allow_redirects=False,
            ) as answer:
                return answer.status, await _read(answer.content)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _no_answer(error) from None

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the upstream's connections are not open")
        return self._session


async def _pass_on(
    content: aiohttp.StreamReader, response: web.StreamResponse, http: web.BaseRequest
) -> None:
    """Each piece at once: nothing waits for the next."""
    while True:
        try:
            chunk = await content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.warning("%s %s: the upstream's answer broke off: %s", http.method, http.path, error)
            # A clean end would make the client take half an answer for a whole one.
            if http.transport is not None:
                http.transport.abort()
            return
        if not chunk:
            return
        await response.write(chunk)


async def _read(content: aiohttp.StreamReader) -> bytes:
    body = bytearray()
    while chunk := await content.readany():
        body += chunk
        if len(body) > MAX_ANSWER:
            raise ApiError(502, f"The upstream's answer has more than {MAX_ANSWER} bytes.")
    return bytes(body)


def _forwarded(
    headers: Mapping[str, str], left_out: Iterable[str] = frozenset()
) -> CIMultiDict[str]:
    """Those of the message itself, in order, repeated ones too."""
    kept = CIMultiDict(headers)
    named = headers.get(hdrs.CONNECTION, "").split(",")
    for name in (*_HOP_BY_HOP, *left_out, *(each.strip() for each in named)):
        kept.popall(name, None)
    return kept


def _no_answer(error: BaseException) -> ApiError:
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return ApiError(503, f"The upstream cannot be reached: {_say(error)}.")
    return ApiError(502, f"The upstream gave no answer: {_say(error)}.")


def _say(error: BaseException) -> str:
    """In one line; what the parser says of bad HTTP has the place in further ones."""
    text = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)
    return (text.splitlines() or [type(error).__name__])[0].rstrip(":.")
