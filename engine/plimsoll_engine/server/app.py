"""The HTTP application: routes, API keys, and every error in one shape.

In: a Service. Out: an ASGI app. Everything here answers from values at hand and never waits for
the core, so ``/health`` and ``/metrics`` are quick however busy the engine is.
"""

from __future__ import annotations

import uuid
from http import HTTPStatus
from types import NoneType
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
from plimsoll_engine.server.answer_types import (
    Chat,
    ChatChunk,
    Completion,
    ModelCard,
    ModelList,
    ModelPermission,
    ServerLoad,
    Text,
    Tokens,
    Version,
)
from plimsoll_engine.server.api_keys import ApiKeys, KeyAuth, KeyMetrics
from plimsoll_engine.server.errors import SERVER_FAILED, ApiError, error_response, invalid_value
from plimsoll_engine.server.load_report import LoadReports
from plimsoll_engine.server.middleware import HttpMetrics, RequestIds
from plimsoll_engine.server.openapi import build_document
from plimsoll_engine.server.operations import BODY_ERRORS, BUSY_ERRORS, Operation, build_route
from plimsoll_engine.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from plimsoll_engine.server.service import Service
from plimsoll_engine.server.validation import check_token_ids

DOCUMENT_PATH = "/openapi.json"
# A step of the largest batch may take this long on a slow CPU; a core that has not gone round for
# longer, with work pending, hangs.
STALE_HEARTBEAT_SECONDS = 60.0


def build_app(service: Service, *, api_keys: ApiKeys | None = None) -> Starlette:
    operations = build_operations(service)
    document = msgspec.json.encode(
        build_document(operations, model_names=service.model.names, has_keys=api_keys is not None)
    )

    async def openapi(http: HttpRequest) -> Response:
        return Response(document, media_type="application/json")

    routes = [build_route(operation, service) for operation in operations]
    routes.append(Route(DOCUMENT_PATH, openapi, methods=["GET"]))
    metrics = service.metrics
    paths = [route.path for route in routes]
    middleware = [
        Middleware(HttpMetrics, registry=metrics.registry, paths=paths),
        Middleware(RequestIds),
    ]
    if api_keys is not None:
        counters = KeyMetrics(metrics.registry, metrics.labels)
        middleware.append(Middleware(KeyAuth, keys=api_keys, metrics=counters))
    generating = [operation.path for operation in operations if operation.events is not None]
    middleware.append(Middleware(LoadReports, paths=generating, snapshot=service.core.snapshot))
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


def build_operations(service: Service) -> list[Operation[Any, Any]]:
    """Everything that is served, but for the document that says so."""
    rest = Endpoints(service)
    probe_failures = (HTTPStatus.SERVICE_UNAVAILABLE,)
    return [
        Operation(
            "/v1/chat/completions",
            "Continue a chat, whole or as a stream.",
            service.chat,
            body=ChatRequest,
            answer=Chat,
            events=ChatChunk,
            errors=(*BODY_ERRORS, *BUSY_ERRORS),
        ),
        Operation(
            "/v1/completions",
            "Continue a text, whole or as a stream.",
            service.complete,
            body=CompletionRequest,
            answer=Completion,
            events=Completion,
            errors=(*BODY_ERRORS, *BUSY_ERRORS),
        ),
        Operation(
            "/v1/models",
            "The names that requests may use.",
            rest.models,
            body=NoneType,
            answer=ModelList,
            methods=("GET",),
            errors=(HTTPStatus.UNAUTHORIZED,),
        ),
        Operation(
            "/tokenize",
            "The token ids of a prompt or of messages.",
            rest.tokenize,
            body=TokenizeRequest,
            answer=Tokens,
            errors=BODY_ERRORS,
        ),
        Operation(
            "/detokenize",
            "The text of token ids.",
            rest.detokenize,
            body=DetokenizeRequest,
            answer=Text,
            errors=BODY_ERRORS,
        ),
        Operation(
            "/health",
            "Whether requests can be served.",
            rest.health,
            body=NoneType,
            answer=None,
            methods=("GET",),
            empty=probe_failures,
        ),
        Operation(
            "/ping",
            "The same as /health.",
            rest.health,
            body=NoneType,
            answer=None,
            methods=("GET", "POST"),
            empty=probe_failures,
        ),
        Operation(
            "/load",
            "Requests between their first and last byte.",
            rest.load,
            body=NoneType,
            answer=ServerLoad,
            methods=("GET",),
        ),
        Operation(
            "/version",
            "The engine's version.",
            rest.version,
            body=NoneType,
            answer=Version,
            methods=("GET",),
        ),
        Operation(
            "/metrics",
            "Prometheus metrics.",
            rest.metrics,
            body=NoneType,
            answer=None,
            methods=("GET",),
            media_type="text/plain",
        ),
    ]


class Endpoints:
    """Everything but the completions."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, http: HttpRequest, body: None) -> ModelList:
        model = self._service.model
        return ModelList(
            [
                ModelCard(
                    id=name,
                    created=model.created,
                    root=model.root,
                    max_model_len=model.ceiling,
                    permission=[
                        ModelPermission(id=f"modelperm-{uuid.uuid4().hex}", created=model.created)
                    ],
                )
                for name in model.names
            ]
        )

    async def tokenize(self, http: HttpRequest, request: TokenizeRequest) -> Tokens:
        service = self._service
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
        return Tokens(
            count=len(tokens),
            max_model_len=service.model.ceiling,
            tokens=tokens,
            token_strs=strings if request.return_token_strs else None,
        )

    async def detokenize(self, http: HttpRequest, request: DetokenizeRequest) -> Text:
        service = self._service
        check_token_ids("tokens", request.tokens, service.model.vocab_size)
        prompt = await service.codec.off_loop(service.codec.show, request.tokens)
        return Text(prompt.text)

    async def health(self, http: HttpRequest, body: None) -> Response:
        """200 while requests can be served; the body is empty, as vLLM's is."""
        service = self._service
        healthy = (
            service.core.failure is None
            and not service.terminating
            and not is_stuck(service.core.snapshot())
        )
        return Response(status_code=200 if healthy else 503)

    async def load(self, http: HttpRequest, body: None) -> ServerLoad:
        return ServerLoad(self._service.load)

    async def version(self, http: HttpRequest, body: None) -> Version:
        return Version(__version__)

    async def metrics(self, http: HttpRequest, body: None) -> Response:
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
        # Not http.url: the client's Host header, which is in it, may be none.
        message = f"{http.method} {http.scope['path']}: {message}"
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
