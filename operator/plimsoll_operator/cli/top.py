"""`top`: one row for each LLMDeployment, and one for each replica whose limits differ.

In: LLMDeployments as read, and the time. Out: rows, and a table of them. Everything comes from
status: what is not known there is shown as ``?``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from plimsoll_operator.cli import words
from plimsoll_operator.cli.view import View, read_view
from plimsoll_operator.spec import TuningMode

Json = dict[str, Any]

# Whatever of these turns out so is shown, the worst first.
_TROUBLE = (
    ("Stalled", "True"),
    ("Available", "False"),
    ("Degraded", "True"),
    ("MetricsAvailable", "False"),
    ("Ready", "False"),
)
_COLUMNS = (
    ("NAMESPACE", "left"),
    ("NAME", "left"),
    ("READY", "right"),
    ("STATE", "left"),
    ("LEN", "right"),
    ("UTIL", "right"),
    ("KV%", "right"),
    ("RUN", "right"),
    ("WAIT", "right"),
    ("OOMS", "right"),
    ("LAST MOVE", "left"),
    ("WHY", "left"),
)


@dataclass(frozen=True)
class Row:
    """``pod`` is set on the row of one replica. ``length`` may be below ``ceiling`` for a while."""

    namespace: str
    name: str
    pod: str | None
    ready: str | None
    state: str
    length: int | None
    ceiling: int | None
    utilization: float | None
    kv_percent: int | None
    running: int | None
    waiting: int | None
    ooms: int | None
    last: str
    why: str


def build_rows(resources: Iterable[Json], now: float) -> list[Row]:
    """By namespace and name."""
    views = sorted((read_view(each) for each in resources), key=lambda v: (v.namespace, v.name))
    return [row for view in views for row in (_row(view, now), *_replica_rows(view))]


def _row(view: View, now: float) -> Row:
    last, why = _last(view, now)
    return Row(
        namespace=view.namespace,
        name=view.name,
        pod=None,
        ready=view.ready,
        state=find_state(view),
        length=view.current.max_model_len,
        ceiling=view.ceiling,
        utilization=view.current.gpu_memory_utilization,
        kv_percent=view.load.kv_percent,
        running=view.load.running,
        waiting=view.load.waiting,
        ooms=view.ooms,
        last=last,
        why=why,
    )


def _replica_rows(view: View) -> list[Row]:
    return [
        Row(
            namespace=view.namespace,
            name=view.name,
            pod=replica.pod,
            ready=None,
            state="",
            length=replica.max_model_len,
            ceiling=view.ceiling,
            utilization=replica.utilization,
            kv_percent=None,
            running=None,
            waiting=None,
            ooms=None,
            last="",
            why="",
        )
        for replica in view.replicas
    ]


def find_state(view: View) -> str:
    """The worst that holds, as its reason; else what the tuner is allowed to do."""
    if view.invalid is not None:
        return "InvalidSpec"
    for kind, status in _TROUBLE:
        condition = view.conditions.get(kind)
        if condition is not None and condition.status == status:
            return f"{'Not' if status == 'False' else ''}{kind}: {condition.reason}{_step(view)}"
    if "Ready" not in view.conditions:
        return words.UNKNOWN
    assert view.deployment is not None
    mode = view.deployment.tuning.mode
    return "Ready" if mode is TuningMode.AUTO else f"Ready, {mode}"


def _step(view: View) -> str:
    """Where the rollout is, while one moves."""
    step = view.rollout.get("step", "Settled")
    return "" if step == "Settled" else f" ({step})"


def _last(view: View, now: float) -> tuple[str, str]:
    """The last move with its rule; where nothing was moved, why the limits are where they are."""
    if not view.state.history:
        return "", view.reason or ""
    change = view.state.history[-1]
    return f"{words.ago(change.time, now)}: {words.move(change)}", f"{change.rule}: {change.reason}"


def render(rows: Iterable[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, side in _COLUMNS:
        # The long texts fold; a name or a figure never does.
        wide = title in ("WHY", "STATE", "LAST MOVE")
        table.add_column(title, justify=side, no_wrap=not wide)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> tuple[str, ...]:
    if row.pod is not None:
        return (
            "",
            f"  {row.pod}",
            "",
            "",
            words.number(row.length),
            words.utilization(row.utilization),
            *([""] * 6),
        )
    length = words.number(row.length)
    if row.ceiling is not None and row.ceiling != row.length:
        length = f"{length}/{row.ceiling}"
    return (
        row.namespace,
        row.name,
        row.ready or words.UNKNOWN,
        row.state,
        length,
        words.utilization(row.utilization),
        words.number(row.kv_percent),
        words.number(row.running),
        words.number(row.waiting),
        words.number(row.ooms),
        row.last,
        row.why,
    )
