"""The rollout as status shows it, and the Events of its turns.

In: the plan's step, what the canary has shown, and what status said before. Out: a part of the next
status, plain values. Pure; what it keeps (which template was proven, surge or not) is read back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plimsoll_operator.desired.status import timestamp
from plimsoll_operator.observed import Observed
from plimsoll_operator.plan import Step, StepReason
from plimsoll_operator.plan.canary import Canary, Probe
from plimsoll_operator.tuning.values import Event

Json = dict[str, Any]

_WORDS = {
    StepReason.SETTLED: "every pod has the wanted template",
    StepReason.CANARY: "one replica gets the new template first",
    StepReason.ROLLING: "the pods get the wanted template, one after the other",
    StepReason.REPLACE_BROKEN: "broken pods are replaced without waiting",
    StepReason.ROLLED_BACK: "the new template was found not to work: its pods go back",
    StepReason.GIVEN_UP: "the template was found not to work, and none before it served",
    StepReason.TRYING_AGAIN: "one pod tries the template that was found not to work",
}
# A turn to one of these is told of, the last as a warning.
_TOLD = (StepReason.CANARY, StepReason.ROLLED_BACK)


@dataclass(frozen=True)
class Rollout:
    """``reason`` is why the strategy was chosen, when this pass chose it."""

    step: Step
    canary: Canary | None = None
    probe: Probe | None = None
    reason: str | None = None
    proven: str | None = None


def build_rollout(observed: Observed, rollout: Rollout) -> Json:
    """Nothing on an object that has not been rolled out since this is known: an idle one is not
    written."""
    before, step = observed.status.get("rollout", {}), rollout.step
    if step.reason is StepReason.SETTLED and not before:
        return {}
    wanted = observed.deployment.replicas
    canary = before.get("canary", {}) if step.reason is not StepReason.CANARY else {}
    message = _WORDS[step.reason]
    if rollout.canary is not None:
        message = rollout.canary.message
        canary = {"pod": rollout.canary.pod.name}
    if rollout.probe is not None and canary:
        canary = {
            "pod": canary.get("pod"),
            "probe": rollout.probe.outcome.value,
            "promptTokens": rollout.probe.prompt_tokens,
            "message": rollout.probe.message,
            "time": timestamp(rollout.probe.at),
        }
    surges = step.replicas > wanted
    strategy = "SurgeFirst" if surges else "DeleteFirst"
    if step.reason is StepReason.SETTLED:
        strategy = before.get("strategy", strategy)
    return {
        "step": step.reason.value,
        "message": message,
        "strategy": strategy,
        "strategyReason": rollout.reason or before.get("strategyReason"),
        "proven": rollout.proven or before.get("proven"),
        "canary": canary,
    }


def rollout_events(previous: Json, rollout: Json) -> tuple[Event, ...]:
    """One for each turn, with from and to; and one when the canary is found to work."""
    before, after = previous.get("step"), rollout.get("step")
    events = []
    if after != before and after in tuple(_TOLD):
        message = f"{before or 'Settled'} -> {after}: {rollout['message']}"
        if after == StepReason.CANARY and rollout.get("strategyReason"):
            message += f" ({rollout['strategy']}: {rollout['strategyReason']})"
        warning = after == StepReason.ROLLED_BACK
        events.append(Event("RolledBack" if warning else "CanaryStarted", message, warning))
    if rollout.get("proven") != previous.get("proven") and rollout.get("proven"):
        events.append(Event("CanaryProven", rollout["message"]))
    return tuple(events)
