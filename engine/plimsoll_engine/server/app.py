"""The HTTP application: routes, API keys, and every error in one shape.

In: a Service. Out: an ASGI app. Everything here answers from values at hand and never waits for
the core, so ``/health`` and ``/metrics`` are quick however busy the engine is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from plimsoll_engine import __version__
from plimsoll_engine.reports import EngineSnapshot
from plimsoll_engine.server.api_keys import ApiKeys, KeyAuth, KeyMetrics
from plimsoll_engine.server.errors import SERVER_FAILED, ApiError, error_response, invalid_value
from plimsoll_engine.server.middleware import HttpMetrics, RequestIds
from plimsoll_engine.server.protocol import DetokenizeRequest, TokenizeRequest
from plimsoll_engine.server.service import Service
from plimsoll_engine.server.validation import check_token_ids

# A step of the largest batch may take this long on a slow CPU; a core that has not gone round for
# longer, with work pending, hangs.
STALE_HEARTBEAT_SECONDS = 60.0


def build_app(service: Service, *, api_keys: ApiKeys | None = None) -> Starlette:
    endpoints = Endpoints(service)
    routes = [
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/completions", service.complete, methods=["POST"]),
        Route("/v1/models", endpoints.models, methods=["GET"]),
        Route("/tokenize", endpoints.tokenize, methods=["POST"]),
        Route("/detokenize", endpoints.detokenize, methods=["POST"]),
        Route("/health", endpoints.health, methods=["GET"]),
        Route("/ping", endpoints.health, methods=["GET", "POST"]),
        Route("/load", endpoints.load, methods=["GET"]),
        Route("/version", endpoints.version, methods=["GET"]),
        Route("/metrics", endpoints.metrics, methods=["GET"]),
    ]
    metrics = service.metrics
    paths = [route.path for route in routes]
    middleware = [
        Middleware(HttpMetrics, registry=metrics.registry, paths=paths),
        Middleware(RequestIds),
    ]
    if api_keys is not None:
        counters = KeyMetrics(metrics.registry, metrics.labels)
        middleware.append(Middleware(KeyAuth, keys=api_keys, metrics=counters))
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            ApiError: _answer_api_error,
            HTTPException: _answer_http_error,
            ClientDisconnect: _answer_nobody,
            RecursionError: _answer_nested,
            Exception: _answer_unexpected,
        },
    )


class Endpoints:
    """Everything but the completions."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, http: HttpRequest) -> Response:
        model = self._service.model
        return _json(
            {
                "object": "list",
                "data": [
                    {
                        "id": name,
                        "object": "model",
                        "created": model.created,
                        "owned_by": "plimsoll",
                        "root": model.root,
                        "parent": None,
                        "max_model_len": model.ceiling,
                        "permission": [],
                    }
                    for name in model.names
                ],
            }
        )

    async def tokenize(self, http: HttpRequest) -> Response:
        service = self._service
        request = await service.read(http, TokenizeRequest)
        if (request.prompt is None) == (request.messages is None):
            raise invalid_value("prompt", request.prompt, "either prompt or messages")
        if request.prompt is not None:
            prompt = await service.encode_text(
                request.prompt, add_special_tokens=request.add_special_tokens
            )
        else:
            prompt = await service.encode_chat(
                request, add_special_tokens=request.add_special_tokens
            )
        tokens = prompt.token_ids
        strings = [service.codec.token_text(token_id) for token_id in tokens]
        return _json(
            {
                "count": len(tokens),
                "max_model_len": service.model.ceiling,
                "tokens": tokens,
                "token_strs": strings if request.return_token_strs else None,
            }
        )

    async def detokenize(self, http: HttpRequest) -> Response:
        service = self._service
        request = await service.read(http, DetokenizeRequest)
        check_token_ids("tokens", request.tokens, service.model.vocab_size)
        prompt = await service.codec.off_loop(service.codec.show, request.tokens)
        return _json({"prompt": prompt.text})

    async def health(self, http: HttpRequest) -> Response:
        """200 while requests can be served; the body is empty, as vLLM's is."""
        service = self._service
        healthy = (
            service.core.failure is None
            and not service.terminating
            and not is_stuck(service.core.snapshot())
        )
        return Response(status_code=200 if healthy else 503)

    async def load(self, http: HttpRequest) -> Response:
        return _json({"server_load": self._service.load})

    async def version(self, http: HttpRequest) -> Response:
        return _json({"version": __version__})

    async def metrics(self, http: HttpRequest) -> Response:
        return Response(self._service.metrics.page(), media_type=CONTENT_TYPE_LATEST)


def is_stuck(snapshot: EngineSnapshot) -> bool:
    pending = snapshot.running + snapshot.waiting
    return pending > 0 and snapshot.heartbeat_age > STALE_HEARTBEAT_SECONDS


async def _answer_api_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _answer_http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code in (404, 405):
        message = f"{http.method} {http.url.path}: {message}"
    return error_response(ApiError(error.status_code, message, headers=error.headers))


async def _answer_nobody(http: HttpRequest, error: Exception) -> Response:
    # Nobody reads this; 499 is what proxies log for it.
    return Response(status_code=499)


async def _answer_nested(http: HttpRequest, error: Exception) -> Response:
    # Nothing here recurses but over a client's JSON: read, checked, quoted or handed to a template.
    return error_response(ApiError(400, "The body is not valid JSON here: it is nested too deeply"))


async def _answer_unexpected(http: HttpRequest, error: Exception) -> Response:
    # Starlette logs the traceback when this handler has answered.
    return error_response(ApiError(500, SERVER_FAILED))


def _json(document: Mapping[str, Any]) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")
