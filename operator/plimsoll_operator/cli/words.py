"""Small values as people read them. In: numbers, times. Out: text; ``?`` for what is not known."""

from __future__ import annotations

from datetime import UTC, datetime

from plimsoll_operator.tuning.values import WHOLE, Change, Parameter

UNKNOWN = "?"


def number(value: float | None, form: str = "{}") -> str:
    return UNKNOWN if value is None else form.format(value)


def utilization(value: float | None) -> str:
    return number(value, "{:.2f}")


def ago(then: float | None, now: float) -> str:
    """``2m ago``; the largest unit alone."""
    if then is None:
        return UNKNOWN
    seconds = max(0.0, now - then)
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit} ago"
    return f"{int(seconds)}s ago"


def time(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def byte_size(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(size) >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} B"


_SHORT = {Parameter.MAX_MODEL_LEN: "length", Parameter.GPU_MEMORY_UTILIZATION: "util"}


def move(change: Change) -> str:
    """``length 8192 -> 4096``; other limits by the names that they have in status."""
    form = "{:g}" if change.parameter in WHOLE else "{:.2f}"
    name = _SHORT.get(change.parameter, change.parameter.value)
    return f"{name} {number(change.before, form)} -> {number(change.after, form)}"
