"""The tuner's state as it stands in status.tuning and status.oom of an LLMDeployment.

In: a decision, or a status. Out: plain JSON, or the state read back; what is absent reads back as
the default, and so does what cannot be read, each entry by itself. Times are written as RFC 3339 in
whole seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from plimsoll_operator import shape
from plimsoll_operator.shape import read_time
from plimsoll_operator.spec import TuningMode
from plimsoll_operator.tuning.values import (
    Change,
    Failure,
    FailureClass,
    Limits,
    OOMRecord,
    Parameter,
    Rule,
    TuningDecision,
    TuningState,
)

Json = dict[str, Any]

LONGEST_REASON = 1024

_LIMITS = {
    "max_model_len": "maxModelLen",
    "gpu_memory_utilization": "gpuMemoryUtilization",
    "max_num_seqs": "maxNumSeqs",
    "max_num_batched_tokens": "maxNumBatchedTokens",
    "watermark": "watermark",
    "long_prompt_tokens": "longPromptTokens",
    "long_prompt_share": "longPromptShare",
}

_LIMITS_SHAPE = shape.record(
    {
        "maxModelLen": shape.positive,
        "gpuMemoryUtilization": shape.share,
        "maxNumSeqs": shape.positive,
        "maxNumBatchedTokens": shape.positive,
        "watermark": shape.fraction,
        "longPromptTokens": shape.positive,
        "longPromptShare": shape.share,
    }
)
_CHANGE_SHAPE = shape.record(
    {
        "time": shape.time,
        "parameter": shape.word(Parameter),
        "from": shape.number,
        "to": shape.number,
        "rule": shape.word(Rule),
        "reason": shape.text,
        "expected": shape.text,
        "revision": shape.integer,
        "inputs": shape.map_of(shape.number),
        "outcome": shape.text,
    },
    required=("time", "parameter", "from", "to", "rule"),
)
_TUNING_SHAPE = shape.record(
    {
        "tuned": _LIMITS_SHAPE,
        "current": _LIMITS_SHAPE,
        "basis": _LIMITS_SHAPE,
        "revision": shape.integer,
        "revisedAt": shape.time,
        "mode": shape.word(TuningMode),
        "generation": shape.integer,
        "history": shape.list_of(_CHANGE_SHAPE),
        "handledFailures": shape.list_of(shape.text),
        "startFailures": shape.map_of(shape.integer),
        "metricsAvailable": shape.boolean,
    }
)
_OOM_SHAPE = shape.record(
    {
        "total": shape.integer,
        "hostMemory": shape.boolean,
        "last": shape.record(
            {
                "time": shape.time,
                "pod": shape.text,
                "class": shape.word(FailureClass),
                "message": shape.text,
                "incident": shape.text,
            },
            required=("class",),
        ),
    }
)


def record_tuning(decision: TuningDecision) -> Json:
    """``{"tuning": ..., "oom": ...}``, the parts of status that are the tuner's."""
    state = decision.state
    tuning = {
        "mode": None if state.mode is None else state.mode.value,
        "current": limits_to_json(decision.limits),
        "target": limits_to_json(decision.target),
        "lowerBound": limits_to_json(decision.lower_bound),
        "upperBound": limits_to_json(decision.upper_bound),
        "uncappedTarget": limits_to_json(decision.uncapped),
        "reason": decision.reason[:LONGEST_REASON],
        "revision": state.revision,
        "revisedAt": write_time(state.revised_at),
        "tuned": limits_to_json(state.tuned),
        "basis": None if state.basis is None else limits_to_json(state.basis),
        "generation": state.generation,
        "handledFailures": list(state.handled),
        "startFailures": dict(state.start_failures),
        "metricsAvailable": state.metrics_available,
        "history": [_change_to_json(change) for change in state.history],
    }
    return {"tuning": _known(tuning), "oom": _oom_to_json(state.oom)}


def read_state(status: Mapping[str, Any]) -> TuningState:
    """The state that the last operator left; a fresh one for a new object. What cannot be read is
    lost by itself: a newer operator's words, or what somebody wrote by hand."""
    tuning = _TUNING_SHAPE(status.get("tuning")) or {}
    mode, basis = tuning.get("mode"), tuning.get("basis")
    return TuningState(
        tuned=limits_from_json(tuning.get("tuned", {})),
        limits=limits_from_json(tuning.get("current", {})),
        revision=tuning.get("revision", 0),
        revised_at=read_time(tuning.get("revisedAt")),
        basis=None if basis is None else limits_from_json(basis),
        mode=None if mode is None else TuningMode(mode),
        generation=tuning.get("generation"),
        history=tuple(_change_from_json(entry) for entry in tuning.get("history", ())),
        handled=tuple(tuning.get("handledFailures", ())),
        oom=_oom_from_json(_OOM_SHAPE(status.get("oom")) or {}),
        start_failures=dict(tuning.get("startFailures", {})),
        metrics_available=tuning.get("metricsAvailable", True),
    )


def limits_to_json(limits: Limits) -> Json:
    """In the spec's names; what is None is left out."""
    return _known({key: getattr(limits, field) for field, key in _LIMITS.items()})


def limits_from_json(limits: Mapping[str, Any]) -> Limits:
    return Limits(**{field: limits.get(key) for field, key in _LIMITS.items()})


def limits_document(revision: int, limits: Limits) -> str:
    """The limits file that an engine reads at its start (key limits.json of NAME-limits)."""
    return json.dumps({"revision": revision, "limits": limits_to_json(limits)}, sort_keys=True)


def _change_to_json(change: Change) -> Json:
    return _known(
        {
            "time": write_time(change.time),
            "parameter": change.parameter.value,
            "from": change.before,
            "to": change.after,
            "rule": change.rule.value,
            "reason": change.reason,
            "expected": change.expected or None,
            "revision": change.revision,
            "inputs": dict(change.inputs) or None,
            "outcome": change.outcome or None,
        }
    )


def _change_from_json(entry: Mapping[str, Any]) -> Change:
    time = read_time(entry["time"])
    assert time is not None
    return Change(
        time=time,
        parameter=Parameter(entry["parameter"]),
        before=entry["from"],
        after=entry["to"],
        rule=Rule(entry["rule"]),
        reason=entry.get("reason", ""),
        expected=entry.get("expected", ""),
        revision=entry.get("revision", 0),
        inputs=dict(entry.get("inputs", {})),
        outcome=entry.get("outcome", ""),
    )


def _oom_to_json(oom: OOMRecord) -> Json:
    if oom.last is None:
        return {"total": oom.total}
    last = oom.last
    entry = {
        "time": write_time(last.at),
        "pod": last.pod,
        "class": last.failure_class.value,
        "message": last.message,
        "incident": last.incident,
    }
    return {"total": oom.total, "hostMemory": oom.host_memory, "last": _known(entry)}


def _oom_from_json(oom: Mapping[str, Any]) -> OOMRecord:
    entry = oom.get("last")
    if entry is None:
        return OOMRecord(oom.get("total", 0))
    last = Failure(
        failure_class=FailureClass(entry["class"]),
        incident=entry.get("incident", ""),
        pod=entry.get("pod", ""),
        message=entry.get("message", ""),
        at=read_time(entry.get("time")),
    )
    return OOMRecord(oom.get("total", 0), last, oom.get("hostMemory", False))


def _known(values: Json) -> Json:
    return {key: value for key, value in values.items() if value is not None}


def write_time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
