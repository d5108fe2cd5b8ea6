"""The runbook's table of failure classes is about exactly the classes that there are."""

import re
from pathlib import Path

from plimsoll_operator.checks import _PRECEDENCE
from plimsoll_operator.tuning.values import FailureClass

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


def rows() -> dict[str, list[str]]:
    text = OPERATIONS.read_text().partition("## Failure classes")[2].partition("\n## ")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if re.match(r"\| [A-Z]", line)
    ]
    return {name: row for row in cells for name in row[0].split(", ")}


def test_every_class_has_a_row_with_what_is_done_and_every_row_is_a_class() -> None:
    table = rows()
    assert set(table) == {each.value for each in FailureClass}
    assert all(len(row) == 4 and all(row) for row in table.values())


def test_every_class_has_its_place_among_root_causes() -> None:
    assert sorted(_PRECEDENCE) == sorted(FailureClass)
