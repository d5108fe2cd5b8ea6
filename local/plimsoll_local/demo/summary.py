"""The end of the demo: the table of what happened, and the verdict on what was promised.

In:  per deployment the client's accounts and the last Reading.
Out: a rich table, sentences, and the list of broken promises (empty = exit code 0). Pure.

The table says what happened, whatever it was; only the tuned side has promises to keep.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from plimsoll_local.demo.outcomes import Account, Outcome, Tally, tally
from plimsoll_local.demo.traffic import Kind
from plimsoll_local.demo.view import MIB, describe_decisions
from plimsoll_local.demo.watch import Reading

# Two medians that differ by less than this share of the larger one are called the same.
SAME_SPEED = 0.1


@dataclass(frozen=True)
class Result:
    """One deployment's burst, over. `reading` is None when the cluster could not be read at all;
    `lowest_free_bytes` is the least memory that was free at any time of the burst, where known."""

    title: str
    accounts: tuple[Account, ...]
    reading: Reading | None
    lowest_free_bytes: int | None = None


def build_table(results: Sequence[Result]) -> Table:
    """Requests by outcome, latencies, kills, restarts and the tuner's moves, a column per result."""
    table = Table(title="The burst, the same for both", title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(result.title, justify="right")
    tallies = [tally(result.accounts) for result in results]
    for name, cells in _rows(results, tallies):
        table.add_row(name, *cells)
    return table


def _rows(results: Sequence[Result], tallies: Sequence[Tally]) -> list[tuple[str, list[str]]]:
    rows = [("requests", [str(counted.arrivals) for counted in tallies])]
    rows += [
        (f"  {outcome.value}", [_share(counted, outcome) for counted in tallies])
        for outcome in Outcome
    ]
    rows.append(("429, come back later (tried again)", [str(t.refusals) for t in tallies]))
    for kind in Kind:
        for label, latencies in (
            ("p50", [counted.first_token_p50_s[kind] for counted in tallies]),
            ("p99", [counted.first_token_p99_s[kind] for counted in tallies]),
        ):
            name = f"first token, {kind.value} prompts, {label}"
            rows.append((name, [_seconds(latency) for latency in latencies]))
    readings = [result.reading for result in results]
    rows.append(("OOM kills", ["unread" if r is None else str(r.oom_kills) for r in readings]))
    rows.append(("restarts", ["unread" if r is None else str(r.restarts) for r in readings]))
    rows.append(("moves of the tuner", [_moves(r) for r in readings]))
    return rows


def describe_moves(result: Result) -> list[str]:
    """What the tuner did to this deployment, one line per decision."""
    return describe_decisions(result.reading)


def describe_losses(result: Result) -> list[str]:
    """What the clients saw of requests that were not answered, equal sights counted together."""
    seen: dict[str, int] = {}
    for account in result.accounts:
        if account.outcome is not Outcome.ANSWERED:
            sight = f"{account.outcome.value}: {account.detail}"
            seen[sight] = seen.get(sight, 0) + 1
    return [f"{count} x {sight}" for sight, count in seen.items()]


def find_broken_promises(tuned: Result) -> list[str]:
    """What the tuned deployment promised and did not keep. Every arrival of the burst is admissible:
    within the ceiling, and small enough for an empty pool."""
    counted = tally(tuned.accounts)
    broken = []
    if counted.answered < counted.arrivals:
        broken.append(
            f"the tuned deployment answered {counted.answered} of {counted.arrivals} admissible requests"
        )
    if tuned.reading is None:
        broken.append("the tuned deployment could not be read, so its OOM kills are unknown")
    elif tuned.reading.oom_kills:
        broken.append(f"the tuned deployment had {tuned.reading.oom_kills} OOM kill(s)")
    return broken


def compare(pinned: Result, tuned: Result) -> str:
    """How the two did beside each other, in two sentences: what was lost, and who was quicker."""
    losses = [_lost(pinned), _lost(tuned)]
    if losses == [None, None]:
        first = (
            f"The pinned copy answered the same {len(pinned.accounts)} requests without an OOM kill, as "
            f"the tuned deployment did: its plan held{_at_the_lowest(pinned)}."
        )
    else:
        had = [loss or "answered every request without an OOM kill" for loss in losses]
        first = f"The pinned copy {had[0]}; the tuned deployment {had[1]}."
    counted = tally(pinned.accounts), tally(tuned.accounts)
    speeds = [_speed(kind, *(one.first_token_p50_s[kind] for one in counted)) for kind in Kind]
    moves = None if tuned.reading is None else len(tuned.reading.decisions)
    told = "unknown moves" if moves is None else _count(moves, "move")
    return f"{first} With {told} of the tuner, {', and '.join(speeds)}."


def _lost(result: Result) -> str | None:
    """None when nothing was."""
    unanswered = sum(account.outcome is not Outcome.ANSWERED for account in result.accounts)
    parts = []
    if result.reading is None:
        parts.append("could not be read, so its OOM kills are unknown")
    elif result.reading.oom_kills:
        parts.append(f"had {_count(result.reading.oom_kills, 'OOM kill')}")
    elif unanswered:
        parts.append("had no OOM kill")
    if unanswered:
        parts.append(f"left {unanswered} of {_count(len(result.accounts), 'request')} unanswered")
    return " and ".join(parts) or None


def _at_the_lowest(result: Result) -> str:
    free = result.lowest_free_bytes
    return "" if free is None else f", with {free / MIB:.0f} MiB free at the lowest"


def _speed(kind: Kind, pinned: float | None, tuned: float | None) -> str:
    """By the median time to the first token, as the tuned deployment's users had it."""
    if pinned is None or tuned is None:
        return f"{kind.value} prompts cannot be compared, since one side answered none"
    word = "as quickly"
    if abs(pinned - tuned) > SAME_SPEED * max(pinned, tuned):
        word = "more quickly" if tuned < pinned else "more slowly"
    return (
        f"{kind.value} prompts got their first token {word} on the tuned one "
        f"({tuned:.1f} s against {pinned:.1f} s at p50)"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _share(counted: Tally, outcome: Outcome) -> str:
    return f"{counted.by_outcome[outcome]} of {counted.arrivals}"


def _seconds(latency: float | None) -> str:
    return "none answered" if latency is None else f"{latency:.1f} s"


def _moves(reading: Reading | None) -> str:
    return "unread" if reading is None else str(len(reading.decisions))
