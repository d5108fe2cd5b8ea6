"""One Event per transition of a condition that a user would look for in `kubectl describe`.

In: the status before and after a pass. Out: Events; none when nothing turned. The tuner makes its
own Events, one per decision.
"""

from __future__ import annotations

from typing import Any

from plimsoll_operator.tuning.values import Event

Json = dict[str, Any]

# (condition, status): whether turning to it is a warning.
_TURNS = {
    ("Ready", "True"): False,
    ("Progressing", "False"): True,
    ("Degraded", "True"): True,
    ("Stalled", "True"): True,
}


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
        if turn in _TURNS and before.get(condition["type"]) != now:
            # A stall turns several conditions for one reason: that is one Event.
            reason = condition["reason"]
            events[reason] = Event(reason, condition["message"], warning=_TURNS[turn])
    return tuple(events.values())
