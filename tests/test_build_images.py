"""A machine that cannot build images is told what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "tools" / "build_images.py"


def test_missing_programs_are_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "operator", "--base=debian", f"--output={tmp_path}"],
        env=os.environ | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "mmdebstrap is missing; what is needed: apt-get install git buildah mmdebstrap\n"
    )
