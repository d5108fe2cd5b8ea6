"""The order in which requests go upstream, as a pure structure."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll_engine.gate.lanes import LaneLimits, Lanes, Ticket


def ticket(tokens: int, sequences: int = 1) -> Ticket:
    return Ticket(sequences, tokens, tokens * sequences)


def lanes(
    max_num_seqs: int = 4, long: int | None = 100, room: int | None = 300
) -> tuple[Lanes, Callable[[int], Ticket]]:
    built = Lanes(LaneLimits(max_num_seqs, long, room))

    def enter(tokens: int, sequences: int = 1) -> Ticket:
        made = ticket(tokens, sequences)
        built.enter(made)
        return made

    return built, enter


def test_long_requests_share_the_lane_and_one_may_always_run() -> None:
    built, enter = lanes()
    first, second, third = enter(200), enter(100 + 1), enter(5)
    assert built.start() == [first, third]
    built.leave(first)
    assert built.start() == [second]
    built.leave(second)
    huge = enter(10_000)
    assert built.start() == [huge]


def test_an_unknown_pool_lets_long_ones_go_one_by_one() -> None:
    built, enter = lanes(room=None)
    first, second = enter(200), enter(200)
    assert built.start() == [first]
    built.leave(first)
    assert built.start() == [second]


def test_a_long_one_does_not_pass_an_earlier_long_one() -> None:
    built, enter = lanes()
    first, big = enter(200), enter(250)
    enter(101 - 1 + 1)
    assert built.start() == [first]
    built.leave(first)
    assert built.start()[0] is big


def test_a_wide_request_goes_alone_and_is_not_passed() -> None:
    built, enter = lanes(max_num_seqs=2)
    small = enter(1)
    assert built.start() == [small]
    wide = Ticket(5, 1, 5)
    built.enter(wide)
    enter(1)
    assert built.start() == []
    built.leave(small)
    assert built.start() == [wide]
    assert built.start() == []


def test_the_length_of_long_may_move_while_requests_wait() -> None:
    built, enter = lanes(long=1000)
    first, second = enter(200), enter(200)
    assert built.start() == [first, second]
    built.limits = LaneLimits(4, 100, 300)
    third = enter(150)
    assert built.start() == []
    built.limits = LaneLimits(4, None, 300)
    assert built.start() == [third]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 5),
    st.one_of(st.none(), st.integers(0, 400)),
    st.lists(
        st.one_of(
            st.tuples(st.just("enter"), st.integers(1, 300), st.integers(1, 6)),
            st.tuples(st.just("leave"), st.integers(0, 30), st.just(0)),
        ),
        max_size=60,
    ),
)
def test_nobody_is_lost_no_bound_is_passed_and_all_are_served(
    max_num_seqs: int, room: int | None, operations: list[tuple[str, int, int]]
) -> None:
    built = Lanes(LaneLimits(max_num_seqs, 100, room))
    here: list[Ticket] = []
    for what, number, sequences in operations:
        if what == "enter":
            here.append(ticket(number, sequences))
            built.enter(here[-1])
        elif here:
            built.leave(here.pop(number % len(here)))
        built.start()
        assert {*built.waiting, *built.running} == set(here)
        assert not {*built.waiting} & {*built.running}
        assert built.running_sequences <= max_num_seqs or len(built.running) == 1
        held = [each.prompt_tokens for each in built.running if built.limits.is_long(each)]
        assert sum(held) <= (room or 0) or len(held) <= 1
        assert not built.waiting or built.running
    # Whoever waits is served when those before have ended: with as many turns as there are.
    for _ in range(len(here)):
        for running in tuple(built.running):
            built.leave(running)
        built.start()
    assert not built.waiting
