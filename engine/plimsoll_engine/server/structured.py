"""What a request says its output must look like -> one grammar's text, or an HTTP 400.

``response_format`` is the OpenAI API's, ``structured_outputs`` and ``guided_*`` are vLLM's. This
module knows no tokenizer: a grammar is about text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import llguidance
import msgspec

from plimsoll_engine.grammar import find_grammar_error
from plimsoll_engine.server.errors import ApiError, invalid_value
from plimsoll_engine.server.protocol import GenerationRequest

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_BYTES = 64 << 10
MAX_CHOICES = 1024
FORM_FIELDS = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
# Between two tokens of JSON. Without a bound a model may write blanks for ever.
FREE_WHITESPACE: JsonCompileOptions = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class Form:
    """A grammar's text, and the field of the request that asks for it."""

    param: str
    text: str


def asks_for_form(request: GenerationRequest) -> bool:
    return any(getattr(request, name) is not None for name in FORM_FIELDS)


def read_form(request: GenerationRequest, *, has_end: bool) -> Form | None:
    """What the output must follow; None: any text.

    ``has_end``: the model has an end token, without which no grammar's end could be said. Takes up
    to some 20 ms: not for the event loop. Raises ApiError(400), which names the field.
    """
    found = [
        (param, grammar)
        for param, grammar in (
            ("response_format", _read_response_format(request.response_format)),
            ("structured_outputs", _read_structured(request.structured_outputs)),
            *(
                (
                    f"guided_{kind}",
                    None if value is None else READERS[kind](f"guided_{kind}", value),
                )
                for kind, value in (
                    ("json", request.guided_json),
                    ("regex", request.guided_regex),
                    ("choice", request.guided_choice),
                    ("grammar", request.guided_grammar),
                )
            ),
        )
        if grammar is not None
    ]
    if not found:
        return None
    if len(found) > 1:
        names = ", ".join(param for param, _ in found)
        raise ApiError(400, f"{names}: only one of them is allowed", param=found[1][0])
    param, grammar = found[0]
    if not has_end:
        raise ApiError(400, f"{param}: this model has no end token to end it with", param=param)
    error = find_grammar_error(grammar)
    if error is not None:
        raise ApiError(400, f"{param}: this engine cannot keep to it: {error}", param=param)
    return Form(param, grammar)


def _read_response_format(given: Any) -> str | None:
    param = "response_format"
    allowed = (
        'an object whose type is "text", "json_object", "json_schema" (with json_schema.schema) '
        'or "regex" (with regex)'
    )
    if given is None:
        return None
    if not isinstance(given, dict):
        raise invalid_value(param, given, allowed)
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return _json(param, ANY_OBJECT)
        case "json_schema":
            wrapper = given.get("json_schema")
            schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
            if schema is None:
                raise invalid_value(f"{param}.json_schema", wrapper, "an object with a schema")
            return _json(param, schema)
        case "regex":
            return _regex(param, given.get("regex"))
        case _:
            raise invalid_value(param, given, allowed)


def _read_structured(given: Any) -> str | None:
    param = "structured_outputs"
    if given is None:
        return None
    kinds = [*READERS, "json_object"]
    allowed = f"an object with one of {', '.join(kinds)}"
    if not isinstance(given, dict):
        raise invalid_value(param, given, allowed)
    set_kinds = [kind for kind in kinds if given.get(kind) not in (None, False)]
    if len(set_kinds) != 1:
        raise invalid_value(param, given, allowed)
    for name in ("structural_tag", "disable_additional_properties"):
        if given.get(name) not in (None, False):
            raise invalid_value(f"{param}.{name}", given[name], "it to be absent: not supported")
    (kind,) = set_kinds
    if kind in ("json", "json_object"):
        schema = ANY_OBJECT if kind == "json_object" else given[kind]
        return _json(param, schema, _read_whitespace(param, given))
    return READERS[kind](param, given[kind])


def _read_whitespace(param: str, given: dict[str, Any]) -> JsonCompileOptions:
    if given.get("disable_any_whitespace"):
        return {"whitespace_flexible": False}
    pattern = given.get("whitespace_pattern")
    if pattern is None:
        return FREE_WHITESPACE
    if not isinstance(pattern, str):
        raise invalid_value(f"{param}.whitespace_pattern", pattern, "a regular expression")
    _check_size(param, pattern)
    return {"whitespace_pattern": pattern}


def _json(param: str, schema: object, whitespace: JsonCompileOptions = FREE_WHITESPACE) -> str:
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except msgspec.DecodeError as error:
            raise ApiError(400, f"{param}: the schema is not JSON: {error}", param=param) from None
    if not isinstance(schema, dict | bool):
        raise invalid_value(param, schema, "a JSON schema, which is an object")
    text = msgspec.json.encode(schema).decode()
    _check_size(param, text)
    return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=whitespace)


def _regex(param: str, pattern: object) -> str:
    if not isinstance(pattern, str) or not pattern:
        raise invalid_value(param, pattern, "a regular expression, not empty")
    _check_size(param, pattern)
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def _choice(param: str, choices: object) -> str:
    allowed = f"a list of 1 to {MAX_CHOICES} texts, none empty"
    if not isinstance(choices, list) or not 1 <= len(choices) <= MAX_CHOICES:
        raise invalid_value(param, choices, allowed)
    for each in choices:
        if not isinstance(each, str) or not each:
            raise invalid_value(param, each, allowed)
    # A JSON text is a text of a Lark grammar too.
    quoted = [msgspec.json.encode(each).decode() for each in choices]
    lark = "start: " + " | ".join(quoted)
    _check_size(param, lark)
    return llguidance.LLMatcher.grammar_from_lark(lark)


def _lark(param: str, grammar: object) -> str:
    if not isinstance(grammar, str) or not grammar:
        raise invalid_value(param, grammar, "a grammar in Lark's form, not empty")
    _check_size(param, grammar)
    return llguidance.LLMatcher.grammar_from_lark(grammar)


READERS: dict[str, Callable[[str, object], str]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _lark,
}


def _check_size(param: str, text: str) -> None:
    size = len(text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise ApiError(
            400,
            f"{param}: {size} bytes are not allowed; expected at most {MAX_GRAMMAR_BYTES}",
            param=param,
        )
