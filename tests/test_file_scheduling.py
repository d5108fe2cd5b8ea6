"""A test process that dies costs the test that it died of, and no other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

CONFTEST = """
from support.file_scheduling import FileScheduling

def pytest_xdist_make_scheduler(config, log):
    return FileScheduling(config, log, str)
"""

DEADLY = """
import os, signal, pytest

@pytest.mark.parametrize("number", range(8))
def test_number(number):
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_outlives_a_process_that_dies(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for number in range(40):
        (tmp_path / f"test_{number:02}.py").write_text("def test_it(): pass\n")
    # Late, when each process has much behind it.
    (tmp_path / "test_30.py").write_text(DEADLY)
    options = ["-n2", "--dist", "loadfile", "--no-loadscope-reorder", "-q", "-p", "no:asyncio"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        check=False,
        cwd=tmp_path,
        # Nothing of the run that this is a test of.
        env={name: value for name, value in os.environ.items() if "PYTEST" not in name}
        | {"PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert re.search(r"\b1 failed, 46 passed\b", ended.stdout), ended.stdout
    assert "crashed while running 'test_30.py::test_number[2]'" in ended.stdout
