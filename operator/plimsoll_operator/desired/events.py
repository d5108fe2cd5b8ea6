"""One Event per transition of a condition, with from and to, as `kubectl describe` shows them.

In: the status before and after a pass. Out: Events; none when nothing turned. The tuner makes its
own Events: one per decision, per death by memory, and when metrics are lost.
"""

from __future__ import annotations

from typing import Any

from plimsoll_operator.tuning.values import OUT_OF_MEMORY, Event

Json = dict[str, Any]

# In these another reason is another trouble, and a new object that begins so is in trouble.
_TROUBLES = {("Progressing", "False"), ("Degraded", "True"), ("Stalled", "True")}
_WARNINGS = {*_TROUBLES, ("Ready", "False"), ("Ready", "Unknown"), ("Available", "False")}
# What the tuner's own Events tell of. That a death by memory stalls the deployment is news.
_TOLD = {("MetricsAvailable", "False"), ("OOMDetected", "True")}
_TOLD_OF = {("Degraded", "True"), ("Ready", "False")}


def build_events(previous: Json, status: Json) -> tuple[Event, ...]:
    """The first status of a condition is no transition, unless it is a trouble or all is well."""
    before = {
        condition["type"]: (condition["status"], condition["reason"])
        for condition in previous.get("conditions", [])
    }
    events: dict[str, Event] = {}
    for condition in status.get("conditions", []):
        turn = (condition["type"], condition["status"])
        now = (condition["status"], condition["reason"])
        reason, known = condition["reason"], before.get(condition["type"])
        told = turn in _TOLD or (turn in _TOLD_OF and reason in tuple(OUT_OF_MEMORY))
        if turn in _TROUBLES:
            turned = known != now
        elif known is None:
            turned = turn == ("Ready", "True")
        else:
            turned = known[0] != now[0]
        if turned and not told:
            # A stall turns several conditions for one reason: that is one Event.
            key = reason if turn in _WARNINGS else condition["type"]
            message = f"{_turn(condition['type'], before)} -> {now[0]}: {condition['message']}"
            events[key] = Event(reason, message, warning=turn in _WARNINGS)
    return tuple(events.values())


def _turn(condition: str, before: dict[str, tuple[str, str]]) -> str:
    """The condition and what it was before, as ``Stalled False (AsExpected)``."""
    if condition not in before:
        return condition
    status, reason = before[condition]
    return f"{condition} {status} ({reason})"
