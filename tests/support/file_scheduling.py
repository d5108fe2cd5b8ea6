"""Which test process runs what: the tests of a file, or of a group of files, in one of them.

In: the tests' node ids, and processes that end or die. Out: units of work for pytest-xdist.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class FileScheduling(LoadFileScheduling):  # type: ignore[misc]
    """`--dist loadfile` for units that a function names, which outlives a process that dies.

    xdist gives everything that a dead process ever had to the others again. What is done is then an
    empty piece of work, and whoever gets one waits for ever; the test that killed the process
    kills the next one too.
    """

    def __init__(self, config: pytest.Config, log: Producer, unit: Callable[[str], str]) -> None:
        super().__init__(config, log)
        self._unit = unit

    def _split_scope(self, nodeid: str) -> str:
        return self._unit(Path(nodeid.split("::", 1)[0]).stem)

    def remove_node(self, node: WorkerController) -> str | None:
        """The test that ``node`` died of, if it had work. That test counts as run."""
        work: dict[str, dict[str, bool]] = self.assigned_work.pop(node)
        left = [name for tests in work.values() for name, done in tests.items() if not done]
        for scope, tests in work.items():
            rest = {name: False for name, done in tests.items() if not done and name != left[0]}
            if rest:
                self.workqueue[scope] = rest
        for other in self.assigned_work:
            self._reschedule(other)
        return left[0] if left else None
