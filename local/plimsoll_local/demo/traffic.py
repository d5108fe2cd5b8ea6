"""The burst of the demo as values: a pure function of trace rows and a seed.

In:  rows of the Azure conversation trace (arrival, prompt tokens, generated tokens) and a shape.
Out: arrivals, sorted by time: many short chats over the whole burst and a few long prompts that come
     close together on top of them.

The gaps between arrivals and the sizes are the trace's; both are stretched to the shape's duration
and token ranges, because a small model on a laptop core is not a GPU fleet. Knows nothing of
words, clients or the cluster.
"""

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from importlib import resources

EXCERPT = "azure_conversation_excerpt.csv"


class Kind(Enum):
    SHORT = "short"
    LONG = "long"


@dataclass(frozen=True)
class TraceRow:
    """One request of a trace: seconds since the first row, and its sizes in tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Arrival:
    """One request of the burst: when it arrives (seconds from the start) and how big it is."""

    number: int
    at_s: float
    kind: Kind
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Stream:
    """Arrivals of one kind: how many, in which span of seconds, in which closed token ranges."""

    kind: Kind
    count: int
    span_s: tuple[float, float]
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


DEMO_BURST = (
    Stream(Kind.SHORT, 40, span_s=(0, 150), prompt_tokens=(64, 256), output_tokens=(16, 32)),
    Stream(Kind.LONG, 6, span_s=(30, 75), prompt_tokens=(1500, 3000), output_tokens=(16, 32)),
)


def read_excerpt() -> tuple[TraceRow, ...]:
    """The rows of the excerpt that comes with the package (data/README.md says whose it is)."""
    file = resources.files("plimsoll_local.demo") / "data" / EXCERPT
    with file.open(encoding="utf-8") as lines:
        return parse_trace(lines.read())


def parse_trace(text: str) -> tuple[TraceRow, ...]:
    """Rows of an Azure LLM inference trace in CSV. Raises ValueError for a row that is not one."""
    rows: list[TraceRow] = []
    first: datetime | None = None
    for row in csv.DictReader(text.splitlines()):
        # The trace has seven digits after the second; datetime takes six.
        arrived = datetime.fromisoformat(row["TIMESTAMP"][:26])
        first = first or arrived
        rows.append(
            TraceRow(
                at_s=(arrived - first).total_seconds(),
                prompt_tokens=int(row["ContextTokens"]),
                output_tokens=int(row["GeneratedTokens"]),
            )
        )
    return tuple(rows)


def shape_burst(
    rows: Sequence[TraceRow], seed: int, streams: Sequence[Stream] = DEMO_BURST
) -> tuple[Arrival, ...]:
    """Arrivals of all streams, sorted by time and numbered from 1.

    Each stream takes as many consecutive rows as it has requests, from a place that the seed
    chooses. Raises ValueError when the trace has fewer rows than a stream has requests.
    """
    chooser = random.Random(seed)
    unnumbered: list[tuple[float, Stream, int, int]] = []
    for stream in streams:
        if stream.count > len(rows):
            raise ValueError(f"the trace has {len(rows)} rows, the burst needs {stream.count}")
        start = chooser.randrange(len(rows) - stream.count + 1)
        part = rows[start : start + stream.count]
        times = _stretch([row.at_s for row in part], stream.span_s)
        prompts = _spread([row.prompt_tokens for row in part], stream.prompt_tokens)
        outputs = _spread([row.output_tokens for row in part], stream.output_tokens)
        unnumbered += [
            (at, stream, prompt, output)
            for at, prompt, output in zip(times, prompts, outputs, strict=True)
        ]
    unnumbered.sort(key=lambda entry: entry[0])
    return tuple(
        Arrival(number, round(at, 3), stream.kind, prompt, output)
        for number, (at, stream, prompt, output) in enumerate(unnumbered, start=1)
    )


def _stretch(times: Sequence[float], span: tuple[float, float]) -> list[float]:
    """Moves times linearly into the span: the proportions of the gaps stay as they are."""
    begin, end = span
    length = times[-1] - times[0]
    if length == 0:
        return [begin for _ in times]
    return [begin + (time - times[0]) / length * (end - begin) for time in times]


def _spread(sizes: Sequence[int], bounds: tuple[int, int]) -> list[int]:
    """Moves sizes linearly into the closed range: the smallest becomes the lower bound and the
    largest the upper one, so every seed covers the whole range and keeps the trace's skew."""
    low, high = bounds
    smallest, largest = min(sizes), max(sizes)
    if smallest == largest:
        return [high for _ in sizes]
    return [round(low + (size - smallest) / (largest - smallest) * (high - low)) for size in sizes]
