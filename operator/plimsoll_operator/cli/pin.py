"""`pin`: the values in force as the part of a manifest that would make them permanent.

In: one LLMDeployment. Out: YAML, with comments that say what applying it does. Applies nothing.
"""

from __future__ import annotations

from typing import Any

import yaml

from plimsoll_operator import names
from plimsoll_operator.cli import words
from plimsoll_operator.cli.errors import CommandError
from plimsoll_operator.cli.view import View
from plimsoll_operator.spec import Deployment, RuntimeName, TuningMode
from plimsoll_operator.tuning.values import LANE, Limits, Parameter

Json = dict[str, Any]

_FLAGS = {
    Parameter.WATERMARK: "--watermark",
    Parameter.LONG_PROMPT_TOKENS: "--long-prompt-tokens",
    Parameter.LONG_PROMPT_SHARE: "--long-prompt-share",
}


def build_pin(view: View) -> Json:
    """Raises CommandError when nothing is in force yet."""
    current = view.current
    if view.deployment is None:
        raise CommandError(f"{view.namespace}/{view.name}: the spec cannot be read: {view.invalid}")
    if current.gpu_memory_utilization is None:
        raise CommandError(
            f"{view.namespace}/{view.name}: status.effective is empty: nothing is in force yet"
        )
    engine: Json = {
        "gpuMemoryUtilization": current.gpu_memory_utilization,
        "maxModelLen": current.max_model_len,
        "maxNumSeqs": current.max_num_seqs,
        "maxNumBatchedTokens": current.max_num_batched_tokens,
        "extraArgs": _arguments(view.deployment, view.state.limits),
    }
    tuning: Json = {"mode": TuningMode.OFF.value}
    bounds = view.deployment.tuning.max_model_len
    if bounds is not None and bounds.max_allowed is not None and current.max_model_len is not None:
        # The ceiling comes down too: what is never admitted is refused with 400, not 429 for ever.
        tuning["maxModelLen"] = {"maxAllowed": current.max_model_len}
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": view.name, "namespace": view.namespace},
        "spec": {
            "engine": {key: value for key, value in engine.items() if value is not None},
            "tuning": tuning,
        },
    }


def _arguments(deployment: Deployment, limits: Limits) -> list[str] | None:
    """The user's own with a flag for each limit that the spec has no word for; None: as they are."""
    if deployment.runtime is RuntimeName.VLLM:
        # The lane is the gate's, and vLLM knows no flag for it: with mode Off it ends.
        return None
    own = deployment.engine.extra_args
    pinned = []
    for parameter in LANE:
        flag, value = _FLAGS[parameter], limits.value(parameter)
        given = any(argument.partition("=")[0] == flag for argument in own)
        if value is not None and not given:
            pinned.append(f"{flag}={value:g}")
    return [*own, *pinned] if pinned else None


def render(view: View, now: float) -> str:
    body = build_pin(view)
    where, source = f"{view.namespace}/{view.name}", view.source or words.UNKNOWN
    comments = [
        f"In force on {where} at {words.time(now)}, source {source}. Nothing has been changed.",
        "Merge it into your manifest, or:",
        f"  kubectl patch llmd {view.name} -n {view.namespace} --type merge --patch-file FILE",
    ]
    if rolls := _flags_that_change(view, body):
        comments.append(f"It replaces the pods once, since these are start flags: {rolls}.")
    if view.replicas:
        comments.append("The replicas differ at this moment; these are the strictest values.")
    if not view.answered:
        comments.append("The operator has not answered the present spec yet.")
    text = yaml.safe_dump(body, sort_keys=False)
    return "\n".join([*(f"# {line}" for line in comments), text])


def _flags_that_change(view: View, body: Json) -> str:
    deployment, engine = view.deployment, body["spec"]["engine"]
    assert deployment is not None
    now = {
        "gpuMemoryUtilization": deployment.engine.gpu_memory_utilization,
        # The flag is the ceiling.
        "maxModelLen": deployment.ceiling,
        "maxNumSeqs": deployment.engine.max_num_seqs,
        "maxNumBatchedTokens": deployment.engine.max_num_batched_tokens,
        "extraArgs": list(deployment.engine.extra_args),
    }
    changed = (
        f"{key} {'auto' if before is None else before} -> {engine[key]}"
        for key, before in now.items()
        if key in engine and engine[key] != before
    )
    return ", ".join(changed)
