"""The operator's log: a line for what was decided, none for a watch event."""

import logging
from typing import Any, cast

import pytest

from plimsoll_operator import report
from plimsoll_operator.__main__ import quiet
from plimsoll_operator.cluster import Cluster
from plimsoll_operator.tuning.values import Event
from support.resources import llmdeployment


async def test_an_event_is_a_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def ignore(*_: Any) -> None:
        pass

    monkeypatch.setattr(report, "is_due", lambda *_: False)
    monkeypatch.setattr(report, "record_event", ignore)
    resource = llmdeployment()
    events = [Event("LengthLowered", "4096 -> 2048"), Event("OOM", "chat-0: killed", warning=True)]
    with caplog.at_level(logging.INFO):
        await report.report(cast(Cluster, None), resource, {}, 0.0, events=events)
    where = f"{resource['metadata']['namespace']}/{resource['metadata']['name']}"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", f"{where}: LengthLowered: 4096 -> 2048"),
        ("WARNING", f"{where}: OOM: chat-0: killed"),
    ]


def test_watch_events_are_no_lines(caplog: pytest.LogCaptureFixture) -> None:
    chatter = logging.getLogger("kopf.objects")
    before = chatter.level
    try:
        quiet()
        chatter.info("Handler 'deployment_changed' succeeded.")
        chatter.warning("Handler failed")
    finally:
        chatter.setLevel(before)
    assert [record.getMessage() for record in caplog.records] == ["Handler failed"]
