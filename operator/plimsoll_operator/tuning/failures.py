"""From what is left of an engine container to the class of its death.

In: a pod as observed. Out: a :class:`Failure`, or None. The engine's own termination message is
believed first, then the kubelet's reason, then what vLLM's last words mean (last_words.py), then the
exit status. Only out-of-memory kills that the kubelet calls
OOMKilled are memory failures: a bare 137 is a SIGKILL by anybody.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from plimsoll_operator.observed import Container, Disruption, Pod, Termination
from plimsoll_operator.tuning.last_words import (
    read_estimated_length,
    read_last_line,
    read_last_words,
)
from plimsoll_operator.tuning.values import Failure, FailureClass

MAX_MESSAGE = 256
SERVING_PHASE = "serving"

_IMAGE_REASONS = {
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
}
_CREATE_REASONS = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}

# What _describe says of a container killed at its limit, read back from status.
_LIMIT_AT_DEATH = re.compile(r"killed at its memory limit of (\S+) ")

_WORDS = {"class", "error", "message", "phase", "suggestion"}

# What a failure of each class means, in words that name a remedy.
_MEANING = {
    FailureClass.CUDA_OOM_AT_START: "device memory ran out while starting",
    FailureClass.CUDA_OOM_AT_RUNTIME: "device memory ran out while serving",
    FailureClass.KV_TOO_SMALL_FOR_MAX_LEN: "the KV cache cannot hold one request of full length",
    FailureClass.MODEL_TOO_LARGE: "the weights do not fit into the memory",
    FailureClass.GPU_BUSY_AT_START: "another process still held device memory",
    FailureClass.GPU_FAULT: "the device reported a fault",
    FailureClass.COLLECTIVE_FAILURE: "the tensor-parallel ranks lost each other",
    FailureClass.MODEL_LOAD_FAILED: "the model could not be loaded",
    FailureClass.INVALID_CONFIGURATION: "the engine refused its configuration",
    FailureClass.ENGINE_DEAD: "the engine died",
}


def classify(pod: Pod) -> Failure | None:
    """The failure that tells most about this pod, recovered or not; None for one that never failed."""
    container = pod.container
    dead = None if container is None else _from_termination(pod, container)
    if dead is not None and dead.failure_class is FailureClass.CGROUP_OOM:
        return dead
    waiting = None if container is None else _from_waiting(pod, container)
    if waiting is not None:
        return waiting
    if pod.disruption is not None:
        return _from_disruption(pod, pod.disruption)
    if dead is not None:
        return dead
    if pod.gate is not None and (failure := _from_gate(pod, pod.gate)) is not None:
        return failure
    if pod.unschedulable is not None:
        return Failure(
            FailureClass.UNSCHEDULABLE,
            f"{pod.uid}/unschedulable",
            pod.name,
            _cut(pod.unschedulable),
            at=pod.unschedulable_since,
        )
    return None


def _from_disruption(pod: Pod, disruption: Disruption) -> Failure:
    where = "" if pod.node is None else f" from node {pod.node}"
    words = f": {disruption.message}" if disruption.message else ""
    return Failure(
        FailureClass.EVICTED,
        f"{pod.uid}/evicted",
        pod.name,
        _cut(f"taken{where} ({disruption.reason}){words}"),
        at=disruption.at,
    )


def _from_waiting(pod: Pod, container: Container) -> Failure | None:
    reason = container.waiting
    if reason in _IMAGE_REASONS:
        failure_class, what = FailureClass.IMAGE_ERROR, f"image {container.image}: {reason}"
    elif reason in _CREATE_REASONS:
        failure_class, what = FailureClass.ENGINE_DEAD, f"its container was not made: {reason}"
    else:
        return None
    message = f"{what}: {container.waiting_message}" if container.waiting_message else what
    incident = f"{pod.uid}/{failure_class}"
    return Failure(failure_class, incident, pod.name, _cut(message))


def _from_gate(pod: Pod, gate: Container) -> Failure | None:
    """The gate's end costs the requests that it had, and says nothing about the engine's memory."""
    if (waiting := _from_waiting(pod, gate)) is not None:
        return waiting
    end = gate.termination
    if end is None or pod.deleting:
        return None
    said = _last_json(end.message)
    invalid = said.get("class") == FailureClass.INVALID_CONFIGURATION
    failure_class = FailureClass.INVALID_CONFIGURATION if invalid else FailureClass.ENGINE_DEAD
    if end.reason == "OOMKilled":
        how = f"it was killed at its memory limit of {gate.memory_limit}"
    else:
        how = f"exit status {end.exit_code}"
        lines = end.message.strip().splitlines()
        if text := said.get("message") or (lines[-1] if lines else ""):
            how += f": {text}"
    death = gate.restarts + 1 if gate.ended else gate.restarts
    return Failure(
        failure_class=failure_class,
        incident=f"{pod.uid}/gate/{death}",
        pod=pod.name,
        message=_cut(f"the gate before the engine ended: {how}"),
        at=end.finished_at,
        started_at=end.started_at,
        exit_code=end.exit_code,
        serving=None,
    )


def _from_termination(pod: Pod, container: Container) -> Failure | None:
    end = container.termination
    if end is None or (pod.deleting and not pod.ended_before):
        return None
    # The n-th death of this pod's container, also while the kubelet still counts n - 1 restarts.
    death = container.restarts + 1 if container.ended else container.restarts
    said = _last_json(end.message)
    failure_class = _class_of(end, said)
    phase = said.get("phase")
    suggestion = said.get("suggestion") or {}
    if not suggestion and (length := read_estimated_length(end.message)):
        suggestion = {"flag": "--max-model-len", "value": length}
    if failure_class is FailureClass.CUDA_OOM_AT_RUNTIME:
        serving: bool | None = True
    else:
        serving = None if phase is None else phase == SERVING_PHASE
    return Failure(
        failure_class=failure_class,
        incident=f"{pod.uid}/{death}",
        pod=pod.name,
        message=_cut(_describe(failure_class, end, said, container.memory_limit)),
        at=end.finished_at,
        started_at=end.started_at,
        exit_code=end.exit_code,
        serving=serving,
        figures=_figures(said),
        suggested_flag=suggestion.get("flag"),
        suggested_value=suggestion.get("value"),
    )


def _class_of(end: Termination, said: Mapping[str, Any]) -> FailureClass:
    if end.reason == "OOMKilled":
        return FailureClass.CGROUP_OOM
    if said.get("class") == FailureClass.ENGINE_DEAD:
        # An error that the engine did not expect, in torch's or CUDA's words.
        words = read_last_words(str(said.get("message", "")))
        return FailureClass.ENGINE_DEAD if words is None else words.failure_class
    if said.get("class") in tuple(FailureClass):
        return FailureClass(said["class"])
    if said.get("error") == "out_of_memory":
        at_runtime = said.get("phase") == SERVING_PHASE
        return FailureClass.CUDA_OOM_AT_RUNTIME if at_runtime else FailureClass.CUDA_OOM_AT_START
    words = read_last_words(end.message)
    return FailureClass.ENGINE_DEAD if words is None else words.failure_class


def _describe(
    failure_class: FailureClass,
    end: Termination,
    said: Mapping[str, Any],
    memory_limit: str | None,
) -> str:
    if failure_class is FailureClass.CGROUP_OOM:
        limit = "" if memory_limit is None else f" of {memory_limit}"
        return f"killed at its memory limit{limit} (OOMKilled, exit status {end.exit_code})"
    if isinstance(text := said.get("message"), str) and text:
        return text
    what = f"{_MEANING[failure_class]} (exit status {end.exit_code})"
    if said:
        figures = ", ".join(f"{key} {value}" for key, value in _figures(said).items())
        return f"{what}: {figures}"
    if failure_class is FailureClass.ENGINE_DEAD and end.exit_code > 128:
        return f"the engine was killed by signal {end.exit_code - 128}"
    words = read_last_words(end.message)
    if words is not None:
        return f"{what}: {words.line}"
    line = read_last_line(end.message)
    return f"{what}: {line}" if line else what


def limit_at_death(failure: Failure) -> str | None:
    """The memory limit of a container that was killed at it, where it is known."""
    found = _LIMIT_AT_DEATH.match(failure.message)
    return None if found is None else found.group(1)


def _figures(said: Mapping[str, Any]) -> dict[str, int | float | str]:
    """Plain figures: those under ``figures``, else the message's own (any engine's JSON)."""
    inner = said.get("figures", said)
    if not isinstance(inner, dict):
        return {}
    return {
        key: value
        for key, value in inner.items()
        if isinstance(value, int | float | str)
        and not isinstance(value, bool)
        and key not in _WORDS
    }


def _last_json(message: str) -> dict[str, Any]:
    """The engine's message is one line of JSON, alone or at the end of a log; {} without one."""
    for line in reversed(message.strip().splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
    return {}


def _cut(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 3] + "..."
