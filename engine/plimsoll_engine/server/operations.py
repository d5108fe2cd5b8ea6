"""One operation of the API: its path, what it takes, what it answers, and who does it.

From the same value the app makes the route that reads, checks and encodes, and ``openapi`` the
document, so that the two cannot differ; mypy sees that the handler takes and gives what is said
here. Nothing here knows what an operation does.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

Body = TypeVar("Body", bound=msgspec.Struct | None)
Answer = TypeVar("Answer", bound=msgspec.Struct)
Given = TypeVar("Given", bound=msgspec.Struct)

# What any operation that takes a body may answer instead: a body that is bad, too slow, too large,
# or not plain; a key that is wrong, a model that is not here; a fault of ours.
BODY_ERRORS = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.INTERNAL_SERVER_ERROR,
)
BUSY_ERRORS = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


class Reader(Protocol):
    async def read(self, http: HttpRequest, kind: type[Given]) -> Given:
        """The body as a value of ``kind``. Raises ApiError."""


@dataclass(frozen=True)
class Operation(Generic[Body, Answer]):
    """``body`` is NoneType for an operation without one; ``answer`` None is an answer that is not
    JSON. ``events`` is the document in each event where the answer may be a stream."""

    path: str
    summary: str
    handle: Callable[[HttpRequest, Body], Awaitable[Answer | Response]]
    body: type[Body]
    answer: type[Answer] | None
    methods: tuple[str, ...] = ("POST",)
    events: type[msgspec.Struct] | None = None
    # Other statuses than 200 whose answer is the error object, and those with an empty one.
    errors: Collection[HTTPStatus] = ()
    empty: Collection[HTTPStatus] = ()
    # Of an answer that is not JSON; None: it is empty.
    media_type: str | None = None


def build_route(operation: Operation[Any, Any], reader: Reader) -> Route:
    async def endpoint(http: HttpRequest) -> Response:
        # Time to first token counts from here, with the reading of the body in it.
        http.scope["arrival_time"] = time.time()
        has_body = operation.body is not type(None)
        body = await reader.read(http, operation.body) if has_body else None
        answer = await operation.handle(http, body)
        return answer if isinstance(answer, Response) else encode(answer)

    return Route(operation.path, endpoint, methods=list(operation.methods))


def encode(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
