"""What an advisor knows, as it stands in the status of a MemoryAdvisor.

In: :class:`Known`, or a status. Out: plain JSON, or what was known read back; what is absent or cannot be
read is left out, each entry by itself. The tuner's parts are tuning/record.py's and, for what was
learned, tuning/profile.py's: they have the form of an LLMDeployment's and a MemoryProfile's status.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plimsoll_operator import shape
from plimsoll_operator.advisor.advice import Advice, Outcome
from plimsoll_operator.advisor.advise import Known
from plimsoll_operator.advisor.traffic import Traffic
from plimsoll_operator.shape import read_time
from plimsoll_operator.tuning.profile import build_profile_status, read_learned
from plimsoll_operator.tuning.record import LONGEST_REASON, read_state, write_time
from plimsoll_operator.tuning.values import Parameter, Rule

Json = dict[str, Any]

_ADVICE_SHAPE = shape.record(
    {
        "parameter": shape.word(Parameter),
        "from": shape.number,
        "to": shape.number,
        "rule": shape.word(Rule),
        "reason": shape.text,
        "expected": shape.text,
        "since": shape.time,
        "last": shape.time,
        "times": shape.positive,
        "calledFor": shape.boolean,
        "outcome": shape.word(Outcome),
    },
    required=("parameter", "to", "rule", "since", "last"),
)
_STATUS_SHAPE = shape.record(
    {
        "history": shape.list_of(_ADVICE_SHAPE),
        "traffic": shape.record(
            {
                "since": shape.time,
                "requests": shape.integer,
                "promptTokens": shape.integer,
                "generationTokens": shape.integer,
                "preemptions": shape.integer,
            },
            required=("since",),
        ),
    }
)


def read_known(status: Mapping[str, Any], now: float) -> Known:
    """``status`` as observed.read_status has it. Of a new object: nothing, from ``now`` on."""
    found = _STATUS_SHAPE(dict(status)) or {}
    traffic = found.get("traffic")
    return Known(
        state=read_state(status),
        learned=read_learned({"status": status.get("learned")}),
        traffic=Traffic(now) if traffic is None else _read_traffic(traffic),
        advice=tuple(_read_advice(entry) for entry in found.get("history", ())),
    )


def write_traffic(traffic: Traffic) -> Json:
    return {
        "since": write_time(traffic.since),
        "requests": traffic.requests,
        "promptTokens": traffic.prompt_tokens,
        "generationTokens": traffic.generation_tokens,
        "preemptions": traffic.preemptions,
        "recomputedTokens": traffic.recomputed_tokens,
    }


def write_advice(advice: Advice) -> Json:
    return {
        "parameter": advice.parameter.value,
        "from": advice.before,
        "to": advice.to,
        "rule": advice.rule.value,
        "reason": advice.reason[:LONGEST_REASON],
        "expected": advice.expected[:LONGEST_REASON],
        "since": write_time(advice.since),
        "last": write_time(advice.last),
        "times": advice.times,
        "calledFor": advice.called_for,
        "outcome": None if advice.outcome is None else advice.outcome.value,
    }


def write_learned(known: Known) -> Json:
    return build_profile_status(known.learned)


def _read_traffic(entry: Mapping[str, Any]) -> Traffic:
    return Traffic(
        since=read_time(entry["since"]) or 0.0,
        requests=entry.get("requests", 0),
        prompt_tokens=entry.get("promptTokens", 0),
        generation_tokens=entry.get("generationTokens", 0),
        preemptions=entry.get("preemptions", 0),
    )


def _read_advice(entry: Mapping[str, Any]) -> Advice:
    outcome = entry.get("outcome")
    return Advice(
        parameter=Parameter(entry["parameter"]),
        before=entry.get("from"),
        to=entry["to"],
        rule=Rule(entry["rule"]),
        reason=entry.get("reason", ""),
        expected=entry.get("expected", ""),
        since=read_time(entry["since"]) or 0.0,
        last=read_time(entry["last"]) or 0.0,
        times=entry.get("times", 1),
        called_for=entry.get("calledFor", False),
        outcome=None if outcome is None else Outcome(outcome),
    )
