"""operator/ is a plain folder: a package there would shadow the standard library's operator."""

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_operator_folder_holds_no_python_file() -> None:
    assert list((ROOT / "operator").glob("*.py")) == []


def test_operator_at_the_root_is_the_standard_library() -> None:
    found = subprocess.run(
        [sys.executable, "-c", "import operator; print(operator.__file__)"],
        cwd=ROOT,
        env={},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip().startswith(sysconfig.get_path("stdlib"))
