"""What a test must know of PromQL: promtool itself, and which metrics an expression names."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from plimsoll_local.debian_programs import find_program

_KEYWORDS = frozenset(
    [
        "and",
        "bool",
        "by",
        "group_left",
        "group_right",
        "ignoring",
        "offset",
        "on",
        "or",
        "unless",
        "without",
    ]
)


def run_promtool(*arguments: str | Path) -> str:
    """Its words; AssertionError with them when it refuses. Skips where there is no promtool."""
    promtool = find_program("promtool")
    if promtool is None:
        pytest.skip("promtool is not here; `make setup` fetches it, or says why it cannot")
    done = subprocess.run(
        [promtool, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


def metric_names(expression: str) -> set[str]:
    """Names that an expression selects by; one that promtool accepts."""
    text = re.sub(r'"[^"]*"', "", expression)
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", text)
    text = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", text)
    names = re.findall(r"(?<![\w:.])[a-zA-Z_:][\w:]*(?!\s*\()(?![\w:])", text)
    return set(names) - _KEYWORDS
