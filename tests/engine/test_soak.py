"""The soak itself: it holds on a sound engine, and a block that is lost now and then fails it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.soak import Soak
from support.soak_report import Report


def test_a_lost_block_fails_the_soak(tmp_path: Path) -> None:
    soak = Soak(tmp_path, seconds=60, seed=0, prompts=4, leak=True)
    report = asyncio.run(soak.run())
    assert any("the engine has died" in fault for fault in report.faults), report.faults


def test_what_it_gains_is_told_from_what_it_starts_with() -> None:
    steady, growing = Report(0), Report(0)
    steady.resident = [100, 500] + [700] * 98
    growing.resident = [700 + each for each in range(100)]
    assert steady.growth() == 0
    assert growing.growth() == 70
