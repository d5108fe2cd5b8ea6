"""What JSON from the cluster must look like before anything relies on it.

In: a value that this operator, a newer one or somebody's hand wrote. Out: the value without what is
not as it should be, or None when nothing of it is left to read. Each part is dropped by itself: one
bad entry never costs the rest. A shape is a function of one value, so shapes are put together like
functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any

Json = dict[str, Any]
Shape = Callable[[object], Any]

# The last second that an RFC 3339 time can name.
_LATEST = 253_402_300_799.0
# Integers go on as int64, some of them plus one.
_LARGEST = 2**53


def text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def boolean(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def integer(value: object) -> int | None:
    """A count: not negative."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 <= value <= _LARGEST else None  # type: ignore[operator,return-value]


def positive(value: object) -> int | None:
    return integer(value) or None


def number(value: object) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # An integer can be too large to be compared with a float.
    return value if abs(value) <= _LARGEST and math.isfinite(value) else None


def share(value: object) -> float | int | None:
    """A fraction of a whole, above nothing."""
    found = number(value)
    return found if found is not None and 0 < found <= 1 else None


def fraction(value: object) -> float | int | None:
    """A part of a whole, which may be nothing of it."""
    found = number(value)
    return found if found is not None and 0 <= found <= 1 else None


def time(value: object) -> str | None:
    """An RFC 3339 time that Unix seconds can be made of."""
    return text(value) if read_time(value) is not None else None


def word(words: type[StrEnum]) -> Shape:
    """One of ``words``; a newer operator may know more of them."""
    known = {each.value for each in words}

    def shaped(value: object) -> str | None:
        return value if isinstance(value, str) and value in known else None

    return shaped


def list_of(item: Shape) -> Shape:
    def shaped(value: object) -> list[Any] | None:
        if not isinstance(value, list):
            return None
        found = (item(each) for each in value)
        return [each for each in found if each is not None]

    return shaped


def map_of(item: Shape) -> Shape:
    def shaped(value: object) -> Json | None:
        if not isinstance(value, dict):
            return None
        found = ((key, item(each)) for key, each in value.items())
        return {key: each for key, each in found if each is not None}

    return shaped


def record(fields: Mapping[str, Shape], required: tuple[str, ...] = ()) -> Shape:
    """An object of which ``fields`` are read: without a required one it is nothing. Other fields
    stay as they are, because nobody here reads them."""

    def shaped(value: object) -> Json | None:
        if not isinstance(value, dict):
            return None
        found = {
            key: each if key not in fields else fields[key](each) for key, each in value.items()
        }
        known = {key: each for key, each in found.items() if each is not None}
        return known if all(key in known for key in required) else None

    return shaped


def read_time(value: object) -> float | None:
    """Unix seconds; None for what is no time, or none that can be written again."""
    if not isinstance(value, str):
        return None
    try:
        seconds = datetime.fromisoformat(value).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
    return seconds if 0 <= seconds <= _LATEST else None
