"""The CustomResourceDefinitions of this version, and what tells a cluster's or a manifest from them.

In: the generated copies beside this package, definitions and manifests as read. Out: differences as
text. The rules over several fields (CEL) are the API server's alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any

import yaml
from jsonschema import Draft4Validator

Json = dict[str, Any]


@cache
def own_definitions() -> dict[str, Json]:
    """By name."""
    folder = resources.files("plimsoll_operator") / "crds"
    bodies = [
        yaml.safe_load(path.read_text())
        for path in sorted(folder.iterdir(), key=lambda path: path.name)
        if path.name.endswith(".yaml")
    ]
    return {body["metadata"]["name"]: body for body in bodies}


def schema_of(definition: Json, version: str) -> Json | None:
    """None when that version is not served."""
    for each in definition["spec"]["versions"]:
        if each["name"] == version and each["served"]:
            schema: Json = each["schema"]["openAPIV3Schema"]
            return schema
    return None


def missing_fields(wanted: Json, found: Json) -> list[str]:
    """Paths that ``wanted`` has and ``found`` has not."""
    return sorted(set(_paths(wanted)) - set(_paths(found)))


def _paths(schema: Json, path: str = "") -> Iterator[str]:
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        yield here
        yield from _paths(field, here)
        yield from _paths(field.get("items", {}), f"{here}[]")


def find_mistakes(resource: object, schema: Json) -> list[str]:
    """What the API server would refuse of a manifest under strict validation, as ``field: why``."""
    validator = Draft4Validator(_strict(schema))
    errors = sorted(validator.iter_errors(resource), key=lambda error: list(map(str, error.path)))
    return [f"{_place(error.absolute_path)}: {error.message}" for error in errors]


def _strict(schema: Json) -> Json:
    """Unknown fields are refused, but for an object's metadata, which has a schema of its own."""
    strict = dict(schema)
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict["properties"] = {
            name: field if name == "metadata" else _strict(field)
            for name, field in schema["properties"].items()
        }
        strict["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        strict["additionalProperties"] = _strict(schema["additionalProperties"])
    if "items" in schema:
        strict["items"] = _strict(schema["items"])
    return strict


def _place(path: Any) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".") or "the object"
