"""docs/engine-faults.md has every report, and every test that it names is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/engine-faults.md"
# Reports of vLLM by number, others by project.
REPORTS = """
40302; 16118 19407; vllm-metal#511 47272; 35541 vllm-rbln#957; 25538 37307 21793;
vllm-ascend#16315 49675; 31731 56897; 5907 5550 52054; 45178 53013 50780; 57475 21410; 27951 26300;
20305 50135 19125; 56830 55169; 39863 19849; 36960 36451 45526; 24910 38157; 24885; 55510 34643;
27313 46611 16841; production-stack#899; 2901 18826 49445; 54947 ATOM#1562; 37011; 33418;
52852 40986; 20302 57336 llm-d-autoscaling#662; 54607; 12621 GHSA-rm76-4mrf-v9r8 44701 54727;
50150 52089; 45086 29233; 44395 34600; kserve#6259
"""
LINK = re.compile(r"\[([^]]+)\]\((https://github\.com/[^)]+)\)")


def rows() -> list[list[str]]:
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| [")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@cache
def functions_of(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_every_report_has_its_row() -> None:
    listed = [[name for name, _ in LINK.findall(row[0])] for row in rows()]
    expected = [
        [f"vllm#{name}" if name.isdigit() else name for name in group.split()]
        for group in REPORTS.split(";")
    ]
    assert listed == expected


@pytest.mark.parametrize("row", rows(), ids=lambda row: LINK.findall(row[0])[0][0])
def test_a_row_is_whole(row: list[str]) -> None:
    reports, happened, answer, shown = row
    for name, url in LINK.findall(reports):
        project, _, number = name.partition("#")
        assert url.endswith(f"/{number}" if number else f"/{name}")
        assert f"/{project}/" in url or not number
    assert happened
    assert answer
    named = re.findall(r"`(tests/[^`]+)`", shown)
    assert named, "no test is named"
    for test in named:
        path, name = test.split("::")
        assert name in functions_of(path), test
