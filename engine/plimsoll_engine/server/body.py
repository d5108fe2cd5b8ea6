"""The bytes of a request's body, bounded in size and in time.

In: an HTTP request. Out: its body, or an ApiError (400, 408, 413, 415). What is in it is not known
here. A client that sends its body byte by byte, or stops in the middle, holds a place and memory
only for so long.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest

from plimsoll_engine.server.errors import ApiError


@dataclass(frozen=True)
class BodyBounds:
    max_bytes: int = 32 << 20
    # Between two pieces of a body, and from the first to the last.
    piece_seconds: float = 30.0
    whole_seconds: float = 300.0


async def receive_body(http: HttpRequest, bounds: BodyBounds) -> bytes:
    """Raises ApiError, or ClientDisconnect when the client is gone first."""
    headers = http.headers
    encoding = headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise ApiError(415, f"Content-Encoding: {encoding} is not allowed; expected a plain body")
    length = headers.get("content-length", "")
    # The server has refused what is no number.
    if len(length) > 20 or int(length or 0) > bounds.max_bytes:
        raise _too_long(bounds)
    body = bytearray()
    pieces = http.stream().__aiter__()
    try:
        async with asyncio.timeout(bounds.whole_seconds):
            while True:
                async with asyncio.timeout(bounds.piece_seconds):
                    piece = await anext(pieces, None)
                if piece is None:
                    return bytes(body)
                body += piece
                if len(body) > bounds.max_bytes:
                    raise _too_long(bounds)
    except TimeoutError:
        # What else comes on this connection would be taken for the next request.
        raise ApiError(
            408,
            f"The body did not arrive in time: expected all of it in {bounds.whole_seconds:g} s, "
            f"and never {bounds.piece_seconds:g} s without a byte",
            headers={"Connection": "close"},
        ) from None


def _too_long(bounds: BodyBounds) -> ApiError:
    return ApiError(
        413,
        f"The body is longer than {bounds.max_bytes} bytes",
        headers={"Connection": "close"},
    )
