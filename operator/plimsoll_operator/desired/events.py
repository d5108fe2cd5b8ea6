"""One Event per transition of a condition that a user would look for in `kubectl describe`.

In: the status before and after a pass. Out: Events; none when nothing turned. The tuner makes its
own Events, one per decision and one per death by memory.
"""

from __future__ import annotations

from typing import Any

from plimsoll_operator.tuning.values import OUT_OF_MEMORY, Event

Json = dict[str, Any]

# (condition, status): whether turning to it is a warning.
_TURNS = {
    ("Ready", "True"): False,
    ("Progressing", "False"): True,
    ("Degraded", "True"): True,
    ("Stalled", "True"): True,
}
# The tuner's Event OOM has told of the death already. That it stalls the deployment is news.
_TOLD = {("Degraded", "True", failure_class.value) for failure_class in OUT_OF_MEMORY}


def build_events(previous: Json, status: Json) -> tuple[Event, ...]:
    """A changed reason counts as a turn as well: another trouble is news."""
    before = {
        condition["type"]: (condition["status"], condition["reason"])
        for condition in previous.get("conditions", [])
    }
    events: dict[str, Event] = {}
    for condition in status.get("conditions", []):
        turn = (condition["type"], condition["status"])
        now = (condition["status"], condition["reason"])
        reason = condition["reason"]
        told = (*turn, reason) in _TOLD
        if turn in _TURNS and not told and before.get(condition["type"]) != now:
            # A stall turns several conditions for one reason: that is one Event.
            message = f"{_turn(condition['type'], before)} -> {now[0]}: {condition['message']}"
            events[reason] = Event(reason, message, warning=_TURNS[turn])
    return tuple(events.values())


def _turn(condition: str, before: dict[str, tuple[str, str]]) -> str:
    """The condition and what it was before, as ``Stalled False (AsExpected)``."""
    if condition not in before:
        return condition
    status, reason = before[condition]
    return f"{condition} {status} ({reason})"
