"""Runs the simulator on a user's own traffic. In: a trace, a GPU, a model. Out: the simulator's lines, its
report and its exit status. Knows the simulator's command line alone: it is another program.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from plimsoll_operator.cli.errors import CommandError

# Of the simulator's requirements, those that the command line does not have anyway.
_NEEDED = ("plimsoll_simulator", "numpy", "matplotlib")


def require_simulator() -> None:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise CommandError(
            f"simulate needs {', '.join(missing)}: install 'plimsoll[cli,simulator]' in place of "
            "'plimsoll[cli]'"
        )


def run_report(config: object, name: str, options: list[str]) -> int:
    """``config`` is the model's parsed config.json. The simulator's exit status: 2 for bad input."""
    with tempfile.TemporaryDirectory(prefix="plimsoll-simulate-") as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(config), encoding="utf-8")
        model = ["--model-config", str(file), "--model-name", name]
        # -P: what lies in the user's folder is not the simulator.
        call = [sys.executable, "-P", "-m", "plimsoll_simulator", "report", *model, *options]
        return subprocess.run(call, check=False).returncode
