"""Request traces as CSV, plain or gzipped. In: a path. Out: a :class:`Trace`.

Columns are ``t_s,input_tokens,output_tokens`` or those of the Azure data set,
``TIMESTAMP,ContextTokens,GeneratedTokens``; others are passed over. This module knows no model.
"""

from __future__ import annotations

import csv
import gzip
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

_PLAIN = ("t_s", "input_tokens", "output_tokens")
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """The file is no trace; the message names line, column and value."""


@dataclass(frozen=True)
class Arrival:
    """``time`` in seconds from the trace's first arrival; lengths in tokens, 1 at least."""

    time: float
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Trace:
    """``arrivals`` in order of time; never empty."""

    name: str
    arrivals: tuple[Arrival, ...]

    @property
    def span(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.arrivals[-1].time


def read_trace(path: Path) -> Trace:
    """Raises TraceError for what is no trace, OSError for what cannot be read."""
    with _open(path) as file:
        reader = csv.DictReader(file)
        try:
            header = tuple(reader.fieldnames or ())
            columns = next((c for c in (_PLAIN, _AZURE) if set(c) <= set(header)), None)
            if columns is None:
                raise TraceError(
                    f"{path}: line 1: columns are {', '.join(header) or 'missing'}; expected "
                    f"{','.join(_PLAIN)} or {','.join(_AZURE)}"
                )
            rows = [_read_row(path, reader.line_num, row, columns) for row in reader]
        except (UnicodeDecodeError, csv.Error, EOFError, gzip.BadGzipFile) as error:
            raise TraceError(f"{path}: after line {reader.line_num}: {error}") from error
    if not rows:
        raise TraceError(f"{path}: has no requests")
    rows.sort(key=lambda arrival: arrival.time)
    start = rows[0].time
    arrivals = tuple(Arrival(r.time - start, r.input_tokens, r.output_tokens) for r in rows)
    return Trace(path.name.split(".")[0], arrivals)


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _read_row(
    path: Path, line: int, row: dict[str, str | None], columns: tuple[str, str, str]
) -> Arrival:
    time, prompt, output = columns

    def fail(column: str, expected: str) -> TraceError:
        return TraceError(f"{path}: line {line}: {column} is {row[column]!r}; expected {expected}")

    def read_tokens(column: str, least: int) -> int:
        try:
            count = int(row[column] or "")
        except ValueError:
            raise fail(column, "a whole number of tokens") from None
        if count < least:
            raise fail(column, f"{least} or more")
        return count

    read_time = _read_seconds if columns is _PLAIN else _read_date
    try:
        seconds = read_time(row[time] or "")
    except ValueError:
        expected = "seconds" if columns is _PLAIN else "a date and time (2023-11-16 18:15:46.68)"
        raise fail(time, expected) from None
    # A request that produced nothing still computed its prompt and sampled once.
    return Arrival(seconds, read_tokens(prompt, 1), max(1, read_tokens(output, 0)))


def _read_seconds(text: str) -> float:
    seconds = float(text)
    if not math.isfinite(seconds):
        raise ValueError(text)
    return seconds


def _read_date(text: str) -> float:
    """The Azure files have seven digits after the second, one more than datetime reads."""
    whole, _, fraction = text.partition(".")
    moment = datetime.fromisoformat(whole).replace(tzinfo=UTC)
    return moment.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
