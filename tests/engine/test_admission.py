from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll_engine.admission import AdmissionState, RefusalReason, judge

OPEN = AdmissionState(
    ceiling=8192,
    admitted=8192,
    planned_pool=16384,
    usable_pool=16384,
    waiting=0,
    max_waiting=4,
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
    changes: dict[str, int],
    prompt: int,
    output: int,
    status: int | None,
    reason: RefusalReason | None,
    why: str,
) -> None:
    state = replace(OPEN, **changes)  # type: ignore[arg-type]
    refused = judge(state, prompt_tokens=prompt, max_tokens=output)
    if refused is None:
        assert status is None, why
        return
    assert (refused.status, refused.reason) == (status, reason), why
    # Only who may come back is told when.
    assert (refused.retry_after is not None) == (status == 429)
    assert refused.retry_after is None or refused.retry_after >= 1


def test_the_400_has_the_phrase_that_clients_look_for_and_both_numbers() -> None:
    refused = judge(replace(OPEN, planned_pool=4000), prompt_tokens=3990, max_tokens=20)
    assert refused is not None
    assert refused.message.startswith("This model's maximum context length is 4000 tokens.")
    assert "20 output tokens" in refused.message
    assert "3990 input tokens" in refused.message
    assert refused.param == "input_tokens"


def test_the_429_never_looks_like_a_400() -> None:
    refused = judge(replace(OPEN, admitted=100), prompt_tokens=99, max_tokens=2)
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
        assert judge(state, prompt_tokens=largest, max_tokens=1) is None
    assert judge(state, prompt_tokens=largest + 1, max_tokens=1) is not None
