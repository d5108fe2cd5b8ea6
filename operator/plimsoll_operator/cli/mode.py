"""`hold` and `resume`: the patch that sets spec.tuning.mode, and what is said about it.

In: the object as read. Out: a merge patch (None: nothing to do) with a sentence. The mode before is
kept in an annotation, because the spec alone does not remember it; the object's resourceVersion
goes along, so that nobody else's change is overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plimsoll_operator import names
from plimsoll_operator.cli.errors import CommandError
from plimsoll_operator.spec import TuningMode

Json = dict[str, Any]

MODE_ANNOTATION = f"{names.GROUP}/mode-before-hold"
# The spec named no mode: the operator's default held.
_UNSET = "unset"
_RETURNS = tuple(mode for mode in TuningMode if mode is not TuningMode.HOLD)


@dataclass(frozen=True)
class Patch:
    body: Json | None
    text: str


def hold(resource: Json) -> Patch:
    name, mode = _name(resource), _mode(resource)
    if mode == TuningMode.HOLD:
        return Patch(None, f"{name} is on Hold already; before it was {_before(resource) or '?'}")
    body = _patch(resource, TuningMode.HOLD.value, mode or _UNSET)
    shown = mode or f"not set ({TuningMode.AUTO})"
    return Patch(body, f"{name}: tuning.mode was {shown}, now Hold: what is in force stays")


def resume(resource: Json, wanted: TuningMode | None = None) -> Patch:
    """``wanted`` overrides what hold has recorded. Raises CommandError when neither says it."""
    name, mode, before = _name(resource), _mode(resource), _before(resource)
    if mode != TuningMode.HOLD:
        return Patch(None, f"{name} is not on Hold: tuning.mode is {mode or 'not set'}")
    if wanted is None and before is None:
        raise CommandError(
            f"{name} was not put on Hold by `kubectl plimsoll hold`, so the mode before is not "
            f"known; say it: --mode {' | '.join(_RETURNS)}"
        )
    if wanted is TuningMode.HOLD:
        raise CommandError(f"--mode is Hold; allowed: {', '.join(_RETURNS)}")
    target = _UNSET if wanted is None else wanted.value
    if wanted is None and before is not None:
        target = before
    body = _patch(resource, None if target == _UNSET else target, None)
    shown = f"not set ({TuningMode.AUTO})" if target == _UNSET else target
    return Patch(body, f"{name}: tuning.mode was Hold, now {shown}")


def _patch(resource: Json, mode: str | None, before: str | None) -> Json:
    """A null removes the field."""
    return {
        "metadata": {
            "resourceVersion": resource["metadata"]["resourceVersion"],
            "annotations": {MODE_ANNOTATION: before},
        },
        "spec": {"tuning": {"mode": mode}},
    }


def _name(resource: Json) -> str:
    return f"{resource['metadata']['namespace']}/{resource['metadata']['name']}"


def _mode(resource: Json) -> str | None:
    mode: str | None = resource["spec"].get("tuning", {}).get("mode")
    return mode


def _before(resource: Json) -> str | None:
    """None for what is no mode: somebody may have edited it."""
    value = resource["metadata"].get("annotations", {}).get(MODE_ANNOTATION)
    return value if value == _UNSET or value in _RETURNS else None
