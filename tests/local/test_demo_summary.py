"""The table and the verdict: they say what happened, and only the tuned side is judged."""

import io
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from plimsoll_local.demo.client import Progress
from plimsoll_local.demo.outcomes import Account, Outcome
from plimsoll_local.demo.summary import (
    Result,
    build_table,
    compare,
    describe_losses,
    find_broken_promises,
)
from plimsoll_local.demo.timeline import Cost, Timeline
from plimsoll_local.demo.traffic import Arrival, Kind
from plimsoll_local.demo.view import Side, describe, render
from plimsoll_local.demo.watch import UNREAD, Decision, EngineGauges, Reading

ARRIVAL = Arrival(number=1, at_s=0.0, kind=Kind.LONG, prompt_tokens=1500, output_tokens=16)
ANSWERED = Account(ARRIVAL, Outcome.ANSWERED, total_s=12.0, first_token_s=8.25, refusals=2)
FAILED = Account(ARRIVAL, Outcome.FAILED, total_s=1.0, detail="APIConnectionError: lost")
LOWERED = Decision("t", "maxModelLen", "4096", "2048", "the pool is full and requests wait")


def reading(oom_kills: int = 0, decisions: tuple[Decision, ...] = ()) -> Reading:
    gauges = EngineGauges(0.5, 3, 5, 2048, 4096, 0.85, 64 * 1024 * 1024, 0)
    return Reading((1, 1), None, gauges, oom_kills, oom_kills, (), decisions)


def print_plain(renderable: RenderableType) -> str:
    output = io.StringIO()
    Console(file=output, width=160).print(renderable)
    return output.getvalue()


def line_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if start in line)


def test_the_table_has_every_outcome_with_all_arrivals_as_denominator() -> None:
    pinned = Result("pinned", (ANSWERED, FAILED), reading(oom_kills=3))
    tuned = Result("tuned", (ANSWERED, ANSWERED), reading(decisions=(LOWERED,)))
    text = print_plain(build_table([pinned, tuned]))
    assert line_of(text, "answered").count("of 2") == 2
    assert "1 of 2" in line_of(text, " failed")
    assert "3" in line_of(text, "OOM kills")
    assert "8.2 s" in line_of(text, "long prompts, p50")
    assert line_of(text, "short prompts, p50").count("none answered") == 2
    assert "1" in line_of(text, "moves of the tuner")


def test_a_kept_promise_is_no_broken_one() -> None:
    assert find_broken_promises(Result("tuned", (ANSWERED,), reading())) == []


def test_broken_promises_name_their_figures() -> None:
    broken = find_broken_promises(Result("tuned", (ANSWERED, FAILED), reading(oom_kills=1)))
    assert broken == [
        "the tuned deployment answered 1 of 2 admissible requests",
        "the tuned deployment had 1 OOM kill(s)",
    ]


def test_a_cluster_that_was_never_read_breaks_the_promise() -> None:
    (broken,) = find_broken_promises(Result("tuned", (ANSWERED,), None))
    assert "unknown" in broken


def test_losses_that_look_the_same_are_counted_together() -> None:
    losses = describe_losses(Result("pinned", (FAILED, ANSWERED, FAILED), reading()))
    assert losses == ["2 x failed: APIConnectionError: lost"]


def test_the_view_shows_values_and_leaves_the_unread_out() -> None:
    known = Side("tuned", Progress(total=46, sent=2), reading(decisions=(LOWERED,)))
    assert "admitted length 2048 of 4096" in describe(known, 30)
    assert "maxModelLen 4096 -> 2048: the pool is full" in describe(known, 30)
    unread = Side("pinned", Progress(total=46), Reading((0, 1), "", UNREAD, 1, 1, (), ()))
    line = describe(unread, 30)
    assert "KV cache" not in line
    assert "OOM kills 1" in line
    text = print_plain(render([known, unread, Side("new", Progress(total=1))], 30))
    assert "50%" in line_of(text, "KV cache")
    assert "2048 of 4096" in line_of(text, "admitted length")


def test_the_timeline_tells_first_run_costs_apart() -> None:
    now = iter([0.0, 4.0, 10.0, 11.0])
    timeline = Timeline(Console(file=io.StringIO()), clock=lambda: next(now))
    with timeline.step("build", Cost.FIRST_RUN):
        pass
    with timeline.step("burst"):
        pass
    assert timeline.total(Cost.FIRST_RUN) == 4.0
    assert timeline.total(Cost.EVERY_RUN) == 1.0
    assert "build (downloads and builds)" in print_plain(timeline.build_table())


def test_every_line_about_a_step_is_indented() -> None:
    output = io.StringIO()
    Timeline(Console(file=output)).say("NAME  READY\nchat  True")
    assert output.getvalue() == "    NAME  READY\n    chat  True\n"


def at(seconds: float) -> Account:
    return replace(ANSWERED, first_token_s=seconds)


TUNED = Result("tuned", (ANSWERED, ANSWERED), reading(decisions=(LOWERED,)))


def test_where_both_held_the_memory_left_is_told() -> None:
    side = Side("pinned", Progress(total=2))
    for free in (90, 36, 80):
        low = replace(reading().gauges, free_bytes_low_water=free * 1024 * 1024)
        side.note(replace(reading(), gauges=low))
    pinned = Result("pinned", (ANSWERED, ANSWERED), side.reading, side.lowest_free_bytes)
    assert compare(pinned, TUNED) == (
        "The pinned copy answered the same 2 requests without an OOM kill, as the tuned deployment "
        "did: its plan held, with 36 MiB free at the lowest. With 1 move of the tuner, short prompts "
        "cannot be compared, since one side answered none, and long prompts got their first token as "
        "quickly on the tuned one (8.2 s against 8.2 s at p50)."
    )


@pytest.mark.parametrize(
    ("pinned", "said"),
    [
        (
            Result("pinned", (ANSWERED, FAILED), reading(oom_kills=1)),
            "The pinned copy had 1 OOM kill and left 1 of 2 requests unanswered; the tuned ",
        ),
        (
            Result("pinned", (ANSWERED, FAILED), reading()),
            "The pinned copy had no OOM kill and left 1 of 2 requests unanswered; the tuned",
        ),
        (
            Result("pinned", (ANSWERED, ANSWERED), reading(oom_kills=2)),
            "The pinned copy had 2 OOM kills; the tuned deployment answered every request",
        ),
        (
            Result("pinned", (ANSWERED,), None),
            "The pinned copy could not be read, so its OOM kills are unknown; the tuned",
        ),
    ],
)
def test_what_the_pinned_copy_lost_is_told(pinned: Result, said: str) -> None:
    assert compare(pinned, TUNED).startswith(said)


@pytest.mark.parametrize(
    ("seconds", "word"), [(4.0, "more slowly"), (7.6, "as quickly"), (16.0, "more quickly")]
)
def test_the_quicker_one_is_named(seconds: float, word: str) -> None:
    pinned = Result("pinned", (at(seconds), at(seconds)), reading())
    told = f"long prompts got their first token {word} on the tuned one (8.2 s against {seconds} s"
    assert told in compare(pinned, TUNED)


def test_a_loss_of_the_tuned_deployment_is_told_as_plainly() -> None:
    tuned = Result("tuned", (FAILED,), reading(oom_kills=1))
    assert (
        "the tuned deployment had 1 OOM kill and left 1 of 1 request unanswered. With 0 moves"
        in compare(Result("pinned", (ANSWERED,), reading()), tuned)
    )
