"""What a client reads when a request is not served: vLLM's error object and status codes.

In: the field, the value and what is allowed, or the core's refusal. Out: an ApiError, which the
app turns into a JSON answer (or, after a stream has begun, into an error event).
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.responses import Response

from plimsoll_engine.admission import Refused
from plimsoll_engine.server.answer_types import Error, ErrorDetail

# Clients switch on these names; where vLLM has one it is vLLM's.
ERROR_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.UNAUTHORIZED: "AuthenticationError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.METHOD_NOT_ALLOWED: "MethodNotAllowedError",
    HTTPStatus.REQUEST_TIMEOUT: "BadRequestError",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "BadRequestError",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "BadRequestError",
    HTTPStatus.TOO_MANY_REQUESTS: "RateLimitError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
}
# What a client reads of a fault of ours; the log has the rest.
SERVER_FAILED = "The server failed on this request; see its log"
# A value is quoted in a message up to this many characters.
QUOTE_LENGTH = 80


class ApiError(Exception):
    """Attributes: status, message, param (the offending field, when there is one), headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    def document(self) -> Error:
        kind = ERROR_TYPES.get(HTTPStatus(self.status), "InternalServerError")
        return Error(
            ErrorDetail(message=self.message, type=kind, param=self.param, code=self.status)
        )


def invalid_value(param: str, value: object, allowed: str) -> ApiError:
    """HTTP 400 that names the field, the value and what would have been accepted."""
    return ApiError(
        HTTPStatus.BAD_REQUEST,
        f"{param}: {quote(value)} is not allowed; expected {allowed}",
        param=param.partition("[")[0].partition(".")[0],
    )


def quote(value: object) -> str:
    """The value as JSON, cut to a readable length."""
    return shorten(msgspec.json.encode(value).decode())


def shorten(text: str) -> str:
    return text if len(text) <= QUOTE_LENGTH else text[: QUOTE_LENGTH - 3] + "..."


def refused(refusal: Refused) -> ApiError:
    headers = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
    return ApiError(refusal.status, refusal.message, param=refusal.param, headers=headers)


def error_response(error: ApiError) -> Response:
    return Response(
        msgspec.json.encode(error.document()),
        status_code=error.status,
        media_type="application/json",
        headers=error.headers,
    )
