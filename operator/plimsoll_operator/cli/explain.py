"""`explain`: why one LLMDeployment has the limits that it has, in the order in which it came to them.

In: a :class:`View`, what its MemoryProfile holds (None: there is none), and the time. Out: sections
of sentences. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll_operator.cli import words
from plimsoll_operator.cli.history import render_changes
from plimsoll_operator.cli.view import View
from plimsoll_operator.spec import Deployment, TuningMode
from plimsoll_operator.tuning.bounds import active_blocks
from plimsoll_operator.tuning.policy import DEFAULT_POLICY
from plimsoll_operator.tuning.settings import tuning_settings
from plimsoll_operator.tuning.values import Learned, Limits, Parameter

_SOURCES = {
    "Spec": "the spec's own values",
    "Tuned": "what the tuner moved them to",
    "Learned": "what is known of this model on this device, from a MemoryProfile",
    "Pinned": "values that are pinned",
}
_MODES = {
    "Off": "the spec's values are in force, and nothing is moved",
    "Advise": "the spec's values are in force; what Auto would do is only shown",
    "Initial": "limits are found at the start, and stay after that",
    "Auto": "limits follow the traffic, within the bounds",
    "Hold": "what was in force stays, and nothing is moved",
}
# (condition, status) that needs a sentence.
_TELLING = (
    ("Stalled", "True"),
    ("Degraded", "True"),
    ("Ready", "False"),
    ("Ready", "Unknown"),
    ("MetricsAvailable", "False"),
    ("MetricsAvailable", "Unknown"),
    ("TuningActive", "False"),
    ("TuningLimited", "True"),
    ("OOMDetected", "True"),
)


@dataclass(frozen=True)
class Section:
    title: str
    lines: tuple[str, ...]


def explain(
    view: View, learned: Learned | None, profile: str | None, now: float
) -> tuple[Section, ...]:
    """``profile`` names the MemoryProfile that was looked for."""
    sections = [Section("In force", _in_force(view, now))]
    if view.deployment is None:
        sections.append(Section("The spec", (f"cannot be read: {view.invalid}",)))
    else:
        sections.append(Section("Where it started", _start(view, view.deployment)))
        sections.append(Section("What was known", _known(view.deployment, learned, profile, now)))
    moved = tuple(render_changes(view.state.history, now))
    sections.append(Section("What the tuner did", moved or ("nothing yet",)))
    sections.append(Section("The last rollout", _rollout(view)))
    sections.append(Section("What holds it now", _present(view, now)))
    return tuple(section for section in sections if section.lines)


def _in_force(view: View, now: float) -> tuple[str, ...]:
    current = view.current
    lines = []
    if current.gpu_memory_utilization is None:
        lines.append("nothing yet: no engine has been started or read")
    else:
        lines.append(
            f"requests up to {words.number(current.max_model_len)} tokens are admitted now, "
            f"{words.number(view.ceiling)} is the most ever"
        )
        lines.append(
            f"engines may fill {words.utilization(current.gpu_memory_utilization)} of the "
            "device's memory"
        )
        lines += _lane(view.state.limits)
        meaning = _SOURCES.get(view.source or "")
        if meaning:
            lines.append(f"source {view.source}: {meaning}")
    if view.replicas:
        each = ", ".join(
            f"{r.pod} {words.number(r.max_model_len)} at {words.utilization(r.utilization)}"
            for r in view.replicas
        )
        lines.append(f"replicas differ for the moment: {each}")
    load = view.load
    if load.at is not None:
        lines.append(
            f"load {words.ago(load.at, now)}: KV cache {words.number(load.kv_percent)} % full, "
            f"{words.number(load.running)} running, {words.number(load.waiting)} waiting"
        )
    if not view.answered:
        lines.append("the operator has not answered the present spec yet")
    return tuple(lines)


def _rollout(view: View) -> tuple[str, ...]:
    """Nothing where none has been seen."""
    rollout = view.rollout
    if "step" not in rollout:
        return ()
    lines = [f"{rollout['step']}: {rollout.get('message', words.UNKNOWN)}"]
    if "strategyReason" in rollout:
        lines.append(f"{rollout.get('strategy', words.UNKNOWN)}: {rollout['strategyReason']}")
    return tuple(lines)


def _lane(limits: Limits) -> list[str]:
    lines = []
    if limits.long_prompt_tokens is not None and limits.long_prompt_share is not None:
        lines.append(
            f"prompts of more than {limits.long_prompt_tokens} tokens hold at most "
            f"{limits.long_prompt_share:.0%} of the cache together; shorter ones may overtake them"
        )
    if limits.watermark is not None:
        lines.append(f"an admission leaves {limits.watermark:.1%} of the cache free")
    return lines


def _start(view: View, deployment: Deployment) -> tuple[str, ...]:
    engine, settings = deployment.engine, tuning_settings(deployment)
    length = "the largest that fits" if engine.max_model_len is None else engine.max_model_len
    lines = [
        f"the spec starts at length {length} and utilisation {engine.gpu_memory_utilization:.2f}",
        f"tuning.mode is {settings.mode}: {_MODES[settings.mode.value]}",
    ]
    if Parameter.GPU_MEMORY_UTILIZATION in settings.live:
        lines.append(
            f"utilisation may be {settings.min_utilization:.2f} to {settings.max_utilization:.2f}"
        )
    else:
        lines.append(
            "vLLM reads utilisation and batch when it starts: they stay what the spec says; the gate "
            "before it moves length, sequences and the long lane"
        )
    if settings.tunes_length:
        floor, top = view.lower.max_model_len or settings.floor, settings.ceiling
        lines.append(
            f"the admitted length may be {words.number(floor)} to {words.number(top)}: what is "
            "longer than the admitted length gets 429, what is longer than the ceiling 400"
        )
    else:
        lines.append("the length is never touched: spec.tuning.maxModelLen is not set")
    return tuple(lines)


def _known(
    deployment: Deployment, learned: Learned | None, profile: str | None, now: float
) -> tuple[str, ...]:
    if learned is None:
        name = f" (MemoryProfile {profile})" if profile else ""
        return (f"nothing is remembered of this model on this device{name}",)
    lines = [f"MemoryProfile {profile}:"]
    active = active_blocks(learned, DEFAULT_POLICY, now)
    for blocked in learned.blocked:
        over = "blocked" if blocked in active else "no longer blocked"
        deaths = "one death" if blocked.count == 1 else f"{blocked.count} deaths"
        lines.append(
            f"utilisation {blocked.utilization:.2f} and above is {over}: {deaths} by "
            f"{blocked.failure_class}, the last {words.ago(blocked.at, now)}; the tuner went to "
            f"{blocked.retreat:.2f}"
        )
    if learned.last_known_good is not None:
        lines.append(f"{learned.last_known_good:.2f} has carried a nearly full cache safely")
    if learned.overrun is not None:
        lines.append(
            f"{learned.overrun:.1%} of the device was once in use above the line "
            f"({words.ago(learned.overrun_at, now)})"
        )
    if learned.last_oom_at is not None:
        wait = DEFAULT_POLICY.no_raise_after_oom - (now - learned.last_oom_at)
        if wait > 0:
            lines.append(f"nothing is raised for another {wait / 3600:.1f} h after the last OOM")
    if len(lines) == 1:
        lines.append("nothing that limits it")
    return tuple(lines)


def _present(view: View, now: float) -> tuple[str, ...]:
    lines = []
    if view.reason:
        lines.append(view.reason)
    advise = view.deployment is not None and view.deployment.tuning.mode is TuningMode.ADVISE
    if advise and view.target != view.current:
        lines.append(
            f"Auto would put length {words.number(view.target.max_model_len)} and utilisation "
            f"{words.utilization(view.target.gpu_memory_utilization)} in force"
        )
    for kind, status in _TELLING:
        condition = view.conditions.get(kind)
        if condition is not None and condition.status == status:
            lines.append(
                f"{kind} {status} ({condition.reason}, {words.ago(condition.since, now)}): "
                f"{condition.message}"
            )
    last = view.last_failure
    if last is not None:
        lines.append(
            f"last death: {last['class']} of {last.get('pod', '?')}: {last.get('message')}"
        )
    return tuple(lines)


def render(view: View, sections: tuple[Section, ...]) -> str:
    lines = [f"{view.namespace}/{view.name}"]
    for section in sections:
        lines += ["", section.title, *(f"  {line}" for line in section.lines)]
    return "\n".join(lines)
