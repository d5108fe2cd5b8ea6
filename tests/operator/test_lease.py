"""Who may write the Lease, and when: a table over what is read and how long it has been so."""

from typing import Any

import pytest

from plimsoll_operator.lease import LeaseTimes, Seen, claim, release

Json = dict[str, Any]
TIMES = LeaseTimes(duration=15.0)
NOW, WALL_CLOCK = 100.0, 1_800_000_000.0


def lease(holder: str, version: str = "7", duration: int = 15) -> Json:
    return {
        "metadata": {"name": "plimsoll", "namespace": "ops", "resourceVersion": version},
        "spec": {
            "holderIdentity": holder,
            "leaseDurationSeconds": duration,
            "acquireTime": "2026-01-01T00:00:00.000000Z",
            "leaseTransitions": 3,
        },
    }


@pytest.mark.parametrize(
    ("live", "seen", "writes"),
    [
        pytest.param(None, None, True, id="no Lease yet"),
        pytest.param(lease("a"), None, True, id="mine"),
        pytest.param(lease("a"), Seen("1", 0.0), True, id="mine, however old"),
        pytest.param(lease("b"), None, False, id="another's, first look"),
        pytest.param(lease("b"), Seen("7", 85.1), False, id="another's, seen for 14.9 s"),
        pytest.param(lease("b"), Seen("7", 85.0), True, id="another's, seen for 15 s"),
        pytest.param(lease("b"), Seen("6", 0.0), False, id="another's, renewed meanwhile"),
        pytest.param(lease("b", duration=60), Seen("7", 45.0), False, id="its own duration counts"),
        pytest.param(lease("b", duration=60), Seen("7", 40.0), True, id="its duration is over"),
        pytest.param(lease(""), None, True, id="given back"),
    ],
)
def test_who_writes(live: Json | None, seen: Seen | None, writes: bool) -> None:
    found = claim(live, seen, "a", TIMES, now=NOW, wall_clock=WALL_CLOCK)
    assert (found.body is not None) == writes
    if found.body is not None:
        assert found.body["spec"]["holderIdentity"] == "a"
        assert found.body["spec"]["renewTime"] == "2027-01-15T08:00:00.000000Z"
    else:
        assert found.holder == "b"


def test_a_renewal_keeps_when_it_was_taken_and_a_change_of_hands_is_counted() -> None:
    renewed = claim(lease("a"), None, "a", TIMES, now=NOW, wall_clock=WALL_CLOCK).body
    taken = claim(lease("b"), Seen("7", 0.0), "a", TIMES, now=NOW, wall_clock=WALL_CLOCK).body
    assert renewed is not None
    assert taken is not None
    assert renewed["spec"]["acquireTime"] == lease("a")["spec"]["acquireTime"]
    assert renewed["spec"]["leaseTransitions"] == 3
    assert taken["spec"]["acquireTime"] == "2027-01-15T08:00:00.000000Z"
    assert taken["spec"]["leaseTransitions"] == 4


def test_a_write_carries_the_version_that_was_read() -> None:
    """So the server refuses the slower of two candidates."""
    for body in (
        claim(lease("b"), Seen("7", 0.0), "a", TIMES, now=NOW, wall_clock=WALL_CLOCK).body,
        release(lease("a")),
    ):
        assert body is not None
        assert body["metadata"]["resourceVersion"] == "7"


def test_what_was_given_back_may_be_taken_at_once() -> None:
    free = release(lease("b"))
    assert claim(free, None, "a", TIMES, now=NOW, wall_clock=WALL_CLOCK).body is not None
