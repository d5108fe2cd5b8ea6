"""The OpenAPI document of the operations that are served, ``/openapi.json``.

In: the same operations that the app routes and the same types that it reads and encodes. Out: the
document. Nothing of the API is written here: what a field may be is said by its type alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from plimsoll_engine import __version__
from plimsoll_engine.server.answer_types import Error
from plimsoll_engine.server.operations import Operation
from plimsoll_engine.server.protocol import REFUSED_FIELDS, GenerationRequest

AnyOperation = Operation[Any, Any]
REFERENCE = "#/components/schemas/{name}"
REQUEST_ID = {
    "X-Request-Id": {
        "description": "The request's own, or a new one.",
        "required": True,
        "schema": {"type": "string"},
    }
}
RETRY_AFTER = {
    "Retry-After": {
        "description": "Seconds, where it is worth while to try again.",
        "schema": {"type": "integer", "minimum": 1},
    }
}
LOAD_REPORT = {
    "endpoint-load-metrics": {
        "description": "The engine's load (ORCA), where the request's endpoint-load-metrics-format "
        "asks for it: TEXT or JSON.",
        "schema": {"type": "string"},
    }
}
RETRIED = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})


def build_document(
    operations: Sequence[AnyOperation], *, model_names: Collection[str], has_keys: bool
) -> dict[str, Any]:
    """``model_names`` are those that a request may name; ``has_keys``: /v1/ asks for a key."""
    types = {kind for operation in operations for kind in _types(operation)}
    _, schemas = msgspec.json.schema_components(
        sorted(types, key=lambda kind: kind.__name__), ref_template=REFERENCE
    )
    for kind in types:
        _narrow(kind, schemas[kind.__name__]["properties"], model_names)
    components: dict[str, Any] = {"schemas": schemas}
    if has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    paths: dict[str, Any] = {}
    for operation in operations:
        described = paths.setdefault(operation.path, {})
        for method in operation.methods:
            described[method.lower()] = _operation(operation, method, has_keys)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Plimsoll engine", "version": __version__},
        "paths": paths,
        "components": components,
    }


def _types(operation: AnyOperation) -> list[type[msgspec.Struct]]:
    found = [Error, operation.answer, operation.events]
    if operation.body is not type(None):
        found.append(operation.body)
    return [each for each in found if each is not None]


def _narrow(
    kind: type[msgspec.Struct], properties: dict[str, Any], model_names: Collection[str]
) -> None:
    """What is known of some fields beside their type."""
    # Of requests alone: an answer's model is the one that was asked for.
    if "model" in properties and "object" not in properties:
        properties["model"] |= {"anyOf": [{"enum": sorted(model_names)}, {"type": "null"}]}
    if issubclass(kind, GenerationRequest):
        for name, harmless in REFUSED_FIELDS.items():
            properties[name] = {"enum": [None, *harmless], "description": "Not supported."}


def _operation(operation: AnyOperation, method: str, has_keys: bool) -> dict[str, Any]:
    headers = REQUEST_ID | (LOAD_REPORT if operation.events is not None else {})
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{method.lower()} {operation.path}",
        "responses": {
            "200": {"description": "OK", "headers": headers, **_content(operation)},
            **{str(int(status)): _error(status) for status in operation.errors},
            **{
                str(int(status)): {"description": status.phrase, "headers": REQUEST_ID}
                for status in operation.empty
            },
        },
    }
    if operation.body is not type(None):
        described["requestBody"] = {"required": True, "content": _json(operation.body)}
    if has_keys and operation.path.startswith("/v1/"):
        described["security"] = [{"key": []}]
    return described


def _content(operation: AnyOperation) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content |= _json(operation.answer)
    if operation.events is not None:
        name = operation.events.__name__
        content["text/event-stream"] = {
            "schema": {
                "type": "string",
                "description": f"Each event is a {name} or an Error; the last one is [DONE].",
            }
        }
    if operation.media_type is not None:
        content[operation.media_type] = {"schema": {"type": "string"}}
    return {"content": content} if content else {}


def _error(status: HTTPStatus) -> dict[str, Any]:
    headers = REQUEST_ID | (RETRY_AFTER if status in RETRIED else {})
    return {"description": status.phrase, "headers": headers, "content": _json(Error)}


def _json(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REFERENCE.format(name=kind.__name__)}}}
