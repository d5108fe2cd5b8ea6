"""`advice`: what MemoryAdvisors say of vLLM that runs already.

In: MemoryAdvisors as read, and the time. Out: a table with a line for each, or one in plain words.
Everything comes from status: what is not known there is shown as ``?``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from plimsoll_operator import shape
from plimsoll_operator.advisor.advice import Advice, flag_of
from plimsoll_operator.advisor.record import read_known
from plimsoll_operator.advisor.traffic import Traffic
from plimsoll_operator.cli import words
from plimsoll_operator.cli.explain import Section
from plimsoll_operator.observed import read_status

Json = dict[str, Any]

_TEXTS = shape.list_of(shape.text)
_SHAPE = shape.record(
    {
        "podsSummary": shape.text,
        "current": shape.record(
            {
                "maxModelLen": shape.positive,
                "gpuMemoryUtilization": shape.share,
                "sources": shape.map_of(shape.text),
            }
        ),
        "load": shape.record({"kvCacheUsagePercent": shape.integer, "time": shape.time}),
        "oom": shape.record({"total": shape.integer}),
        "absentMetrics": _TEXTS,
        "recommendation": shape.record(
            {
                "summary": shape.text,
                "vllmFlags": _TEXTS,
                "gateFlags": _TEXTS,
                "reasons": _TEXTS,
                "saves": _TEXTS,
            }
        ),
    }
)
_COLUMNS = (
    ("NAMESPACE", "left"),
    ("NAME", "left"),
    ("TARGET", "left"),
    ("STATE", "left"),
    ("PODS", "right"),
    ("LEN", "right"),
    ("UTIL", "right"),
    ("KV%", "right"),
    ("OOMS", "right"),
    ("ADVICE", "left"),
)


@dataclass(frozen=True)
class Row:
    namespace: str
    name: str
    target: str
    state: str
    pods: str | None
    length: int | None
    utilization: float | None
    kv_percent: int | None
    ooms: int | None
    advice: str | None


def build_rows(resources: Iterable[Json]) -> list[Row]:
    """By namespace and name."""
    rows = [_row(resource) for resource in resources]
    return sorted(rows, key=lambda row: (row.namespace, row.name))


def _row(resource: Json) -> Row:
    metadata, reference = resource["metadata"], resource["spec"]["targetRef"]
    status = _SHAPE(resource.get("status")) or {}
    current, load = status.get("current", {}), status.get("load", {})
    return Row(
        namespace=metadata["namespace"],
        name=metadata["name"],
        target=f"{reference['kind']} {reference['name']}",
        state=_state(resource),
        pods=status.get("podsSummary"),
        length=current.get("maxModelLen"),
        utilization=current.get("gpuMemoryUtilization"),
        kv_percent=load.get("kvCacheUsagePercent"),
        ooms=status.get("oom", {}).get("total"),
        advice=status.get("recommendation", {}).get("summary"),
    )


def _state(resource: Json) -> str:
    ready = _conditions(resource).get("Ready")
    if ready is None:
        return words.UNKNOWN
    return "Ready" if ready["status"] == "True" else f"NotReady: {ready['reason']}"


def _conditions(resource: Json) -> dict[str, Json]:
    return {each["type"]: each for each in read_status(resource).get("conditions", ())}


def render_table(rows: Iterable[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, side in _COLUMNS:
        # A name or a figure never folds.
        folds = title in ("STATE", "ADVICE")
        table.add_column(title, justify=side, no_wrap=not folds)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(
            row.namespace,
            row.name,
            row.target,
            row.state,
            row.pods or words.UNKNOWN,
            words.number(row.length),
            words.utilization(row.utilization),
            words.number(row.kv_percent),
            words.number(row.ooms),
            row.advice or words.UNKNOWN,
        )
    return table


def explain(resource: Json, now: float) -> tuple[Section, ...]:
    """What is read, what stands and why, what there is to save, and what came before."""
    status = _SHAPE(resource.get("status")) or {}
    known = read_known(read_status(resource), now)
    advised = status.get("recommendation", {})
    traffic = known.traffic if "traffic" in (resource.get("status") or {}) else None
    sections = (
        Section("What is read", _read(resource, status, now)),
        Section("What it runs with", _settings(status)),
        Section("What would be changed", _changes(advised)),
        Section("What there is to save", (*advised.get("saves", ()), *_seen(traffic, now))),
        Section("What was advised so far", tuple(_told(each, now) for each in known.advice)),
    )
    return tuple(section for section in sections if section.lines)


def _read(resource: Json, status: Mapping[str, Any], now: float) -> tuple[str, ...]:
    reference, load = resource["spec"]["targetRef"], status.get("load", {})
    lines = [f"{reference['kind']} {reference['name']}: {status.get('podsSummary', '?')} pods"]
    if "time" in load:
        percent = words.number(load.get("kvCacheUsagePercent"))
        at = words.ago(shape.read_time(load["time"]), now)
        lines.append(f"{at}: the fullest KV cache was {percent} % full")
    for each in _conditions(resource).values():
        usual = each["status"] == ("False" if each["type"] == "OOMDetected" else "True")
        if not usual and each["type"] != "ChangeAdvised":
            told = f"{each['type']} {each['status']} ({each['reason']})"
            lines.append(f"{told}: {each['message']}")
    if absent := status.get("absentMetrics"):
        lines.append(f"not on every page: {', '.join(absent)}")
    return tuple(lines)


def _settings(status: Mapping[str, Any]) -> tuple[str, ...]:
    current = dict(status.get("current", {}))
    sources = current.pop("sources", {})
    return tuple(
        f"{name} {value}, by {'its flag' if sources.get(name) == 'Flag' else 'its page'}"
        for name, value in sorted(current.items())
    )


def _changes(advised: Mapping[str, Any]) -> tuple[str, ...]:
    lines = []
    if flags := advised.get("vllmFlags"):
        lines.append(f"vLLM: {' '.join(flags)}")
    elif advised:
        lines.append("vLLM: as it is")
    if flags := advised.get("gateFlags"):
        lines.append(f"with the gate before it: {' '.join(flags)}")
    return (*lines, *advised.get("reasons", ()))


def _seen(traffic: Traffic | None, now: float) -> tuple[str, ...]:
    if traffic is None:
        return ()
    seen = f"{traffic.requests} requests, {traffic.prompt_tokens} tokens of prompts"
    begin = words.ago(traffic.since, now)
    return (f"seen since {begin}: {seen}, {traffic.preemptions} preemptions",)


def _told(advice: Advice, now: float) -> str:
    became = "it stands" if advice.outcome is None else advice.outcome.value.lower()
    times = "once" if advice.times == 1 else f"{advice.times} times"
    return (
        f"{words.ago(advice.last, now)}: {flag_of(advice)} ({advice.rule}, {times}), {became}: "
        f"{advice.reason}"
    )


def render(resource: Json, sections: Iterable[Section]) -> str:
    metadata = resource["metadata"]
    lines = [f"{metadata['namespace']}/{metadata['name']}"]
    for section in sections:
        lines += ["", section.title, *(f"  {line}" for line in section.lines)]
    return "\n".join(lines)
