from typing import Any

import pytest

from plimsoll_operator import stall
from plimsoll_operator.checks import Violation
from plimsoll_operator.observed import Observed, Pod
from plimsoll_operator.tuning.values import Failure, FailureClass
from support.resources import NOW, llmdeployment, observed, pod, statefulset, time

Json = dict[str, Any]
CAUSE = Violation("ModelLoadFailed", "pod assistant-1: no folder /models/later (3 failed starts)")
TOO_LARGE = Violation("ModelTooLarge", "pod assistant-1: needs 9 GiB")


def old(ordinal: int, **state: Any) -> Pod:
    return pod(f"assistant-{ordinal}", revision="old", **state)


def new(ordinal: int, **state: Any) -> Pod:
    return pod(f"assistant-{ordinal}", revision="new", **state)


def stalled(
    cause: Violation = CAUSE,
    *,
    status: str = "True",
    blocked: str = "new",
    since: float = NOW,
    **more: Any,
) -> Json:
    """The status of a deployment whose template was given up."""
    return {
        "revision": {"blocked": [blocked], **more.pop("revision", {})},
        "conditions": [
            {
                "type": "Stalled",
                "status": status,
                "reason": cause.reason,
                "message": cause.message,
                "observedGeneration": 3,
                "lastTransitionTime": time(since),
            }
        ],
        **more,
    }


def seen(
    status: Json, *pods: Pod, update: str = "new", generation: int = 3, **spec: Any
) -> Observed:
    return observed(
        llmdeployment(generation=generation, **spec),
        pods=pods,
        statefulset=statefulset(current="old", update=update),
        status=status,
    )


REFUSED = Violation("Refused", "StatefulSet assistant: spec.template...: Invalid value")
UNREADABLE = Violation("InvalidSpec", "spec.drain is x; allowed: a duration")
DIED = {"last": {"time": time(NOW), "pod": "a-1", "class": "ModelTooLarge", "message": "9 GiB"}}


@pytest.mark.parametrize(
    ("found", "applied", "cause"),
    [
        (seen(stalled(), old(0)), True, CAUSE),
        # no edit outside the template lifts it
        (seen(stalled(), old(0), generation=9, replicas=1), True, CAUSE),
        (seen(stalled(), old(0), generation=9, tuning={"mode": "Hold"}), True, CAUSE),
        # nor another stall that stood in its place: the last death tells why
        (
            seen(stalled(REFUSED, failures=DIED), old(0)), True,
            Violation("ModelTooLarge", "pod a-1: 9 GiB"),
        ),
        (
            seen(stalled(UNREADABLE), old(0)), True,
            Violation("RevisionBlocked", "revision new was found not to work"),
        ),
        # what it says of the next try is no part of the cause
        (
            seen(stalled(stall.explain(CAUSE, try_at=NOW, room=True, now=NOW))), True, CAUSE,
        ),
        # a rollout that had its time and found no cause
        (
            seen(stalled(Violation("ProgressDeadlineExceeded", "it waits")), old(0)), True,
            Violation("ProgressDeadlineExceeded", "it waits"),
        ),
        # a count of 0 does: nothing is left that a try could harm
        (seen(stalled(), replicas=0), True, None),
        # another template does
        (seen(stalled(), old(0)), False, None),
        (seen(stalled(), old(0), update="newer"), True, None),
        # this one was blocked once, and its second rollout is under way
        (seen(stalled(status="False"), old(0)), True, None),
        # it serves after all, and nothing before it did
        (seen(stalled(), old(0, ready=False), new(1)), True, None),
        # a canary that answers for a moment is not proven by that
        (seen(stalled(), old(0), new(1)), True, CAUSE),
        (seen(stalled(rollout={"proven": "new"}), old(0), new(1)), True, None),
        # what was done about it is no part of the cause either
        (seen(stalled(stall.explain_rollback(CAUSE, "old")), old(0)), True, CAUSE),
        (seen(stalled(), old(0), new(1, ready=False)), True, CAUSE),
        (seen(stalled(REFUSED, revision={"lastKnownGood": "new"}), new(0)), True, None),
        (seen({}, old(0)), True, None),
        (observed(status=stalled()), True, None),
    ],
)  # fmt: skip
def test_only_another_template_lifts_a_block(
    found: Observed, applied: bool, cause: Violation | None
) -> None:
    assert stall.recorded_give_up(found, applied=applied) == cause


@pytest.mark.parametrize(
    ("pods", "status", "gives_up"),
    [
        ((new(0, ready=False),), {}, True),
        # a template that worked before is not what is broken
        ((new(0, ready=False),), {"revision": {"lastKnownGood": "new"}}, False),
        ((new(0, ready=False),), {"revision": {"lastKnownGood": "old"}}, True),
        # nor one that works elsewhere
        ((new(0), new(1, ready=False)), {}, False),
        ((old(0), new(1, ready=False)), {"revision": {"lastKnownGood": "old"}}, True),
    ],
)
def test_only_a_template_that_never_worked_is_given_up(
    pods: tuple[Pod, ...], status: Json, gives_up: bool
) -> None:
    found = observed(pods=pods, statefulset=statefulset(replicas=2), status=status)
    cause = stall.find_stall(found, applied=True, refusals=(), give_up=TOO_LARGE)
    assert (cause == TOO_LARGE) is gives_up
    assert stall.find_stall(found, applied=False, refusals=(), give_up=TOO_LARGE) is None


@pytest.mark.parametrize(
    ("refusals", "give_up", "cause"),
    [
        ((), None, CAUSE),
        # the same again, with another count, is no news
        ((), Violation(CAUSE.reason, "pod assistant-1: no folder (4 failed starts)"), CAUSE),
        # the folder is there now, and holds too much
        ((), TOO_LARGE, TOO_LARGE),
        ((REFUSED,), TOO_LARGE, REFUSED),
    ],
)
def test_which_cause_a_stall_shows(
    refusals: tuple[Violation, ...], give_up: Violation | None, cause: Violation
) -> None:
    found = seen(stalled(), old(0), new(1, ready=False))
    assert stall.find_stall(found, applied=True, refusals=refusals, give_up=give_up) == cause


MINUTE = 60.0


@pytest.mark.parametrize(
    ("cause", "since", "died", "minutes"),
    [
        # each pause is twice the one before, an hour at most
        (CAUSE, 0, 0, 5),
        (CAUSE, 0, 5, 15),
        (CAUSE, 0, 14.9, 15),
        (CAUSE, 0, 15, 35),
        (CAUSE, 0, 36, 75),
        (CAUSE, 0, 75, 135),
        (CAUSE, 0, 24 * 60, 24 * 60 + 15),
        # a death of before the stall uses nothing up
        (CAUSE, 0, -60, 5),
        # a start that takes long may run into the next time, which is then used up as well
        (CAUSE, 0, 40, 75),
        # the same start cannot end otherwise
        (TOO_LARGE, 0, 0, None),
        (Violation("InvalidConfiguration", "length"), 0, 0, None),
        (Violation("CgroupOOM", "8Gi"), 0, 0, None),
        (REFUSED, 0, 0, None),
    ],
)
@pytest.mark.parametrize("in_status", [True, False])
def test_when_a_template_is_tried_again(
    cause: Violation, since: float, died: float, minutes: float | None, in_status: bool
) -> None:
    at = NOW + died * MINUTE
    death = Failure(FailureClass.MODEL_LOAD_FAILED, "i", "assistant-0", "no folder", at=at)
    last = {"time": time(at), "pod": "assistant-0", "class": "x", "message": "x"}
    found = seen(stalled(cause, since=NOW + since, failures={"last": last} if in_status else {}))

    due = stall.next_try(found, cause, () if in_status else (death,), NOW + 9e6)

    assert due == (None if minutes is None else NOW + minutes * MINUTE)


def test_the_first_try_counts_from_the_pass_that_gives_up() -> None:
    assert stall.next_try(seen({}), CAUSE, (), NOW) == NOW + 5 * MINUTE
    assert stall.next_try(seen(stalled()), None, (), NOW) is None


@pytest.mark.parametrize(
    ("try_at", "room", "note"),
    [
        (None, True, ""),
        (None, False, ""),
        (
            NOW + 1, True,
            f"; tried again at {time(NOW + 1)}, or at once with any change of spec.podTemplate",
        ),
        (NOW, True, f"; tried again since {time(NOW)}"),
        (NOW + 1, False,
         "; tried again when spec.replicas leaves room beside the pods that are kept"),
    ],
)  # fmt: skip
def test_a_stall_says_what_becomes_of_it(try_at: float | None, room: bool, note: str) -> None:
    shown = stall.explain(CAUSE, try_at=try_at, room=room, now=NOW)
    assert shown == Violation(CAUSE.reason, CAUSE.message + note)


# Case B01.
@pytest.mark.parametrize(("first", "last"), [(NOW, NOW + 299), (NOW + 300, NOW + 3600)])
def test_between_two_tries_the_message_does_not_move(first: float, last: float) -> None:
    def message(status: Json, now: float) -> str:
        found = seen(status)
        cause = stall.recorded_give_up(found, applied=True)
        assert cause is not None
        try_at = stall.next_try(found, cause, (), now)
        return stall.explain(cause, try_at=try_at, room=True, now=now).message

    before = message(stalled(), first)
    assert message(stalled(Violation(CAUSE.reason, before)), last) == before


def test_nothing_stalls_where_nothing_is_wanted_but_a_refusal() -> None:
    found = seen(stalled(), new(0, deleting=True), replicas=0)
    assert stall.find_stall(found, applied=True, refusals=(), give_up=TOO_LARGE) is None
    told = stall.find_stall(found, applied=True, refusals=(REFUSED,), give_up=TOO_LARGE)
    assert told == REFUSED


def test_a_refused_child_stalls() -> None:
    found = stall.find_stall(observed(), applied=False, refusals=(REFUSED,), give_up=None)
    assert found == REFUSED
