"""Container logs in the form the kubelet reads: ``TIME STREAM P|F TEXT`` a line.

In: raw output (writing), or a log file and the wishes of ``kubectl logs`` (reading). Out: such
lines, or their text. ``F`` ends a line of the program, ``P`` is a piece of a longer one.
Standard library only: the writer runs in a shim. This module knows no HTTP.
"""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

# The most of one line that is held back; a longer one is written in pieces.
MAX_PIECE = 16 * 1024


class _Sink(Protocol):
    def write(self, data: bytes, /) -> int | None: ...


class LineWriter:
    """Turns chunks of one stream into whole log lines in ``sink``; ``clock`` is Unix seconds."""

    def __init__(self, sink: _Sink, stream: str, clock: Callable[[], float]) -> None:
        self._sink = sink
        self._stream = stream.encode()
        self._clock = clock
        self._rest = b""

    def write(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        output = [piece for line in lines for piece in self._pieces(line)]
        while len(self._rest) > MAX_PIECE:
            output.append((b"P", self._rest[:MAX_PIECE]))
            self._rest = self._rest[MAX_PIECE:]
        if output:
            self._put(output)

    def flush(self) -> None:
        """Writes what is left of a last line that had no newline."""
        if self._rest:
            self._put([(b"F", self._rest)])
            self._rest = b""

    @staticmethod
    def _pieces(line: bytes) -> Iterator[tuple[bytes, bytes]]:
        while len(line) > MAX_PIECE:
            yield b"P", line[:MAX_PIECE]
            line = line[MAX_PIECE:]
        yield b"F", line

    def _put(self, pieces: Iterable[tuple[bytes, bytes]]) -> None:
        at = format_time(self._clock()).encode()
        self._sink.write(b"".join(b"%s %s %s %s\n" % (at, self._stream, *p) for p in pieces))


def format_time(seconds: float) -> str:
    """Unix seconds as RFC 3339 with nine decimals, as the kubelet prints."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%f") + "000Z"


def parse_time(text: str) -> float:
    """Unix seconds of an RFC 3339 time."""
    return datetime.datetime.fromisoformat(text).timestamp()


@dataclass(frozen=True)
class LogOptions:
    """What ``kubectl logs`` asks for. ``since`` is Unix seconds; None means no bound."""

    follow: bool = False
    timestamps: bool = False
    tail_lines: int | None = None
    since: float | None = None
    limit_bytes: int | None = None


def render_line(line: bytes, options: LogOptions) -> bytes:
    """One stored line as the user wants it; b"" when it is too old or not a log line."""
    parts = line.split(b" ", 3)
    if len(parts) < 4:
        return b""
    at, _, tag, text = parts
    if options.since is not None and parse_time(at.decode()) < options.since:
        return b""
    text = text.rstrip(b"\n") + (b"\n" if tag == b"F" else b"")
    return at + b" " + text if options.timestamps else text


def read_log(path: Path, options: LogOptions) -> tuple[bytes, int]:
    """The log as it is now, and the offset to follow it from."""
    if not path.exists():
        return b"", 0
    with path.open("rb") as file:
        lines: Iterable[bytes] = file
        if options.tail_lines is not None:
            lines = deque(file, maxlen=options.tail_lines)
        rendered = b"".join(render_line(line, options) for line in lines)
        offset = file.tell()
    if options.limit_bytes is not None:
        rendered = rendered[: options.limit_bytes]
    return rendered, offset


def read_new_lines(path: Path, offset: int, options: LogOptions) -> tuple[bytes, int]:
    """What whole lines came after ``offset``, and the offset to go on from."""
    if not path.exists():
        return b"", offset
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    whole = data.rfind(b"\n") + 1
    lines = data[:whole].split(b"\n")
    return b"".join(render_line(line, options) for line in lines), offset + whole


def tail_text(path: Path, max_lines: int, max_bytes: int) -> str:
    """The end of the program's output, for a termination message taken from the log."""
    text, _ = read_log(path, LogOptions(tail_lines=max_lines))
    return text[-max_bytes:].decode(errors="replace")
