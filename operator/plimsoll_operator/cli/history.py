"""`history`: the tuner's last decisions of one LLMDeployment, oldest first.

In: the object as read. Out: entries, and text with one paragraph each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from plimsoll_operator.cli import words
from plimsoll_operator.cli.view import View
from plimsoll_operator.tuning.values import Change

Json = dict[str, Any]


def build_entries(view: View) -> list[Json]:
    return [
        {
            "time": words.time(change.time),
            "parameter": change.parameter.value,
            "from": change.before,
            "to": change.after,
            "rule": change.rule.value,
            "reason": change.reason,
            "expected": change.expected,
            "outcome": change.outcome,
            "revision": change.revision,
        }
        for change in view.state.history
    ]


def render(view: View, now: float) -> str:
    if not view.state.history:
        return f"{view.namespace}/{view.name}: the tuner has moved nothing yet"
    return "\n".join(render_changes(view.state.history, now))


def render_changes(changes: Iterable[Change], now: float) -> list[str]:
    """Three lines at most for each: what, why, and what came of it."""
    lines = []
    for change in changes:
        when = f"{words.time(change.time)} ({words.ago(change.time, now)})"
        lines.append(f"{when}  {words.move(change)}  by rule {change.rule}")
        if change.reason:
            lines.append(f"    because {change.reason}")
        if change.outcome:
            lines.append(f"    then    {change.outcome}")
        elif change.expected:
            lines.append(f"    expects {change.expected} (not judged yet)")
    return lines
