from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll_engine.admission import AdmissionState, Lengths, LongQueue, RefusalReason, judge

OPEN = AdmissionState(
    ceiling=8192,
    admitted=8192,
    planned_pool=16384,
    usable_pool=16384,
    block_size=16,
    free_blocks=1024,
    reserved_blocks=10,
    running=2,
    max_running=2,
    max_running_ever=2,
    waiting=0,
    max_waiting=4,
    next_tokens=(),
    draining=False,
)


@pytest.mark.parametrize(
    ("changes", "prompt", "output", "status", "reason", "why"),
    [
        ({}, 8000, 192, None, None, "exactly the ceiling"),
        ({}, 8000, 193, 400, RefusalReason.TOO_LONG, "one token over it"),
        ({}, 8192, 1, 400, RefusalReason.TOO_LONG, "a prompt that leaves no room for a token"),
        ({"planned_pool": 512}, 500, 13, 400, RefusalReason.TOO_LONG, "over an empty pool"),
        ({"admitted": 4096}, 4000, 96, None, None, "exactly the admitted length"),
        ({"admitted": 4096}, 4000, 97, 429, RefusalReason.OVER_ADMITTED_LENGTH, "over it: later"),
        ({"usable_pool": 1024}, 1000, 25, 429, RefusalReason.OVER_ADMITTED_LENGTH, "shrunk pool"),
        ({"waiting": 3}, 10, 10, None, None, "the last place in the queue"),
        ({"waiting": 4}, 10, 10, 429, RefusalReason.QUEUE_FULL, "no place in the queue"),
        ({"waiting": 4, "running": 1, "next_tokens": (16,)}, 10, 10, None, None, "one starts"),
        ({"running": 0, "arriving": (10,) * 5}, 10, 10, None, None, "two of those start"),
        ({"running": 0, "arriving": (10,) * 6}, 10, 10, 429, RefusalReason.QUEUE_FULL, "too many"),
        (
            {"running": 1, "waiting": 4, "next_tokens": (15985,), "free_blocks": 1009},
            10,
            10,
            429,
            RefusalReason.QUEUE_FULL,
            "a free slot, but no room in the pool above its reserve",
        ),
        ({"draining": True}, 10, 10, 503, RefusalReason.DRAINING, "on the way out"),
        ({"draining": True}, 9000, 1, 400, RefusalReason.TOO_LONG, "never, not even elsewhere"),
        (
            {"waiting": 4, "admitted": 10},
            10,
            10,
            429,
            RefusalReason.OVER_ADMITTED_LENGTH,
            "the longer lasting reason is the one that counts",
        ),
    ],
)
def test_who_may_enter(
    changes: dict[str, object],
    prompt: int,
    output: int,
    status: int | None,
    reason: RefusalReason | None,
    why: str,
) -> None:
    state = replace(OPEN, **changes)  # type: ignore[arg-type]
    refused = judge(state, [Lengths(prompt, output)])
    if refused is None:
        assert status is None, why
        return
    assert (refused.status, refused.reason) == (status, reason), why
    # Only who may come back is told when.
    assert (refused.retry_after is not None) == (status == 429)
    assert refused.retry_after is None or refused.retry_after >= 1


def test_the_400_has_the_phrase_that_clients_look_for_and_both_numbers() -> None:
    refused = judge(replace(OPEN, planned_pool=4000), [Lengths(3990, 20)])
    assert refused is not None
    assert refused.message.startswith("This model's maximum context length is 4000 tokens.")
    assert "20 output tokens" in refused.message
    assert "3990 input tokens" in refused.message
    assert refused.param == "input_tokens"


def test_the_429_never_looks_like_a_400() -> None:
    refused = judge(replace(OPEN, admitted=100), [Lengths(99, 2)])
    assert refused is not None
    assert "maximum context length" not in refused.message
    assert "100 tokens" in refused.message


@pytest.mark.parametrize(
    ("changes", "largest"),
    [
        ({}, 8191),
        ({"admitted": 100}, 99),
        ({"usable_pool": 64}, 63),
        ({"usable_pool": 0}, 0),
    ],
)
def test_the_largest_prompt_leaves_room_for_one_token(
    changes: dict[str, int], largest: int
) -> None:
    state = replace(OPEN, **changes)  # type: ignore[arg-type]
    assert state.largest_prompt == largest
    if largest:
        assert judge(state, [Lengths(largest, 1)]) is None
    assert judge(state, [Lengths(largest + 1, 1)]) is not None


IDLE = replace(OPEN, running=0)


@pytest.mark.parametrize(
    ("changes", "count", "prompt", "status", "why"),
    [
        ({}, 6, 10, None, "two run, four wait"),
        ({}, 7, 10, 400, "one more than ever finds a place"),
        ({"running": 1}, 6, 10, 429, "when the one that runs has ended"),
        ({"running": 2, "waiting": 4}, 7, 10, 400, "never, however busy"),
        ({"draining": True}, 7, 10, 400, "never, not even elsewhere"),
        ({"max_running": 1}, 6, 10, 429, "when the limit is raised again"),
        ({"free_blocks": 0, "usable_pool": 32}, 6, 10, 429, "when the pool has grown again"),
        ({"max_running": 8, "max_running_ever": 8}, 12, 10, None, "eight run"),
        ({"max_running": 8, "max_running_ever": 8}, 6, 8000, None, "the pool has room for two"),
        ({"max_running": 8, "max_running_ever": 8}, 7, 8000, 400, "and four wait"),
    ],
)
def test_all_sequences_of_a_request_enter_or_none(
    changes: dict[str, int], count: int, prompt: int, status: int | None, why: str
) -> None:
    state = replace(IDLE, **changes)  # type: ignore[arg-type]
    refused = judge(state, [Lengths(prompt, 1)] * count)
    assert (refused and refused.status) == status, why
    if status == 400:
        assert refused is not None
        assert refused.reason is RefusalReason.TOO_MANY_SEQUENCES
        assert f"{count} sequences" in refused.message


@pytest.mark.parametrize("max_running", [1, 2, 8])
@pytest.mark.parametrize("max_waiting", [1, 2, 5])
@pytest.mark.parametrize("prompt", [1, 100, 4000, 8000])
@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_an_idle_engine_never_says_later(
    max_running: int, max_waiting: int, prompt: int, count: int
) -> None:
    state = replace(
        IDLE, max_running=max_running, max_running_ever=max_running, max_waiting=max_waiting
    )
    refused = judge(state, [Lengths(prompt, 1)] * count)
    assert refused is None or refused.status == 400


# One sequence may run, one does, and another waits with 40 tokens.
BOUNDED = replace(
    OPEN,
    running=1,
    max_running=1,
    max_running_ever=1,
    waiting=1,
    waiting_tokens=40,
    max_waiting_tokens=100,
)
EMPTY_QUEUE = {"waiting": 0, "waiting_tokens": 0}


@pytest.mark.parametrize(
    ("changes", "prompts", "status", "why"),
    [
        ({}, [60], None, "with those that wait exactly the bound"),
        ({}, [61], 429, "one token over it"),
        (EMPTY_QUEUE, [500], None, "one alone may wait"),
        (EMPTY_QUEUE, [1, 50, 51], 400, "in an idle engine two would wait, over the bound"),
        (EMPTY_QUEUE | {"arriving": (41,)}, [60], 429, "one is on its way"),
        ({"running": 0, "next_tokens": (40,)}, [100], None, "the one that waits starts"),
        ({"max_waiting_tokens": None}, [5000], None, "no bound"),
        ({"max_waiting": 1}, [1], 429, "the other bound"),
    ],
)
def test_the_queue_is_bounded_in_tokens_too(
    changes: dict[str, object], prompts: list[int], status: int | None, why: str
) -> None:
    state = replace(BOUNDED, **changes)  # type: ignore[arg-type]
    refused = judge(state, [Lengths(prompt, 1) for prompt in prompts])
    assert (refused and refused.status) == status, why
    if status == 429:
        assert refused is not None
        assert refused.reason is RefusalReason.QUEUE_FULL
        assert refused.retry_after is not None
        assert f"{sum(prompts)} tokens" in refused.message


@pytest.mark.parametrize(
    ("changes", "longest", "why"),
    [
        ({"running": 0, "free_blocks": 1024}, 8191, "an idle engine takes what it admits"),
        ({"running": 1, "free_blocks": 110}, 1600, "beside another, above the reserve"),
        ({"running": 1, "free_blocks": 5}, 0, "the reserve alone is left"),
        ({"running": 2}, 0, "no slot is free"),
        ({"running": 1, "waiting": 1}, 0, "behind one that waits"),
        ({"running": 1, "arriving": (9,)}, 0, "behind one that arrives"),
        ({"running": 1, "admitted": 500}, 499, "no more than is admitted"),
        (
            {"running": 1, "long_prompt_tokens": 1000, "free_lane_blocks": 100},
            1600,
            "a long one within its lane",
        ),
        (
            {"running": 1, "long_prompt_tokens": 1000, "free_lane_blocks": 3},
            1000,
            "the lane is full: the longest of the short ones",
        ),
    ],
)
def test_the_longest_prompt_that_starts_at_once(
    changes: dict[str, object], longest: int, why: str
) -> None:
    assert replace(OPEN, **changes).largest_prompt_startable == longest, why  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("waiting", "room", "arriving", "prompt", "admitted", "why"),
    [
        (0, 0, (), 9000, True, "the first may wait, however long it is"),
        (2000, 0, (), 2000, True, "exactly what may wait"),
        (2000, 0, (), 2001, False, "a token more"),
        (2000, 0, (), 1000, True, "not long: it does not count"),
        (2000, 2000, (), 9000, True, "those that wait start at once, so it is the first"),
        (2001, 2000, (), 9000, False, "one of them still waits"),
        (0, 0, (2000,), 2001, False, "one that is on its way waits too"),
        (0, 0, (1000, 1000), 9000, True, "short ones on their way do not"),
    ],
)
def test_long_prompts_that_wait_have_a_bound(
    waiting: int, room: int, arriving: tuple[int, ...], prompt: int, admitted: bool, why: str
) -> None:
    queue = LongQueue(threshold=1000, waiting=waiting, room=room, most=4000)
    state = replace(OPEN, ceiling=16384, admitted=16384, max_waiting=99, arriving=arriving)
    refused = judge(replace(state, long_queue=queue), [Lengths(prompt, 10)])
    assert judge(state, [Lengths(prompt, 10)]) is None, "without the bound"
    if admitted:
        assert refused is None, why
    else:
        assert refused is not None, why
        assert (refused.status, refused.reason) == (429, RefusalReason.LONG_QUEUE_FULL)
        assert refused.retry_after == 10
        for figure in ("2000" if waiting != 2001 else "1 tokens", "4000", str(prompt), "1000"):
            assert figure in refused.message


def test_a_request_of_several_long_prompts_counts_them_all() -> None:
    queue = LongQueue(threshold=1000, waiting=2000, room=0, most=4000)
    state = replace(OPEN, max_waiting=99, long_queue=queue)
    assert judge(state, [Lengths(2000, 10), Lengths(900, 10)]) is None
    refused = judge(state, [Lengths(1500, 10)] * 2)
    assert refused is not None
    assert refused.reason is RefusalReason.LONG_QUEUE_FULL
