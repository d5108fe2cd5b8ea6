"""The launcher before vLLM: its log as it was, and its errors where the kubelet reads them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from plimsoll_operator.runtimes import vllm_launcher
from plimsoll_operator.tuning.last_words import read_last_words
from plimsoll_operator.tuning.values import FailureClass


def launch(script: str, log: Path) -> subprocess.Popen[str]:
    """As the pod does it: from text, here with another termination log."""
    text = Path(vllm_launcher.__file__).read_text().replace("/dev/termination-log", str(log))
    command = [sys.executable, "-c", text, sys.executable, "-Suc", script]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_the_cause_outlasts_the_traceback_that_hides_it(tmp_path: Path) -> None:
    script = (
        "print('INFO: starting')\n"
        "print('(EngineCore pid=9) ERROR [core.py:1] ValueError: No available memory for the cache blocks')\n"
        "print('(APIServer pid=1)   File api_server.py, raise ValueError(\\n' * 500)\n"
        "print('(APIServer pid=1) RuntimeError: Engine core initialization failed.')\n"
        "print('(APIServer pid=1) RuntimeError: Engine core initialization failed.')\n"
        "raise SystemExit(3)"
    )
    child = launch(script, tmp_path / "log")
    out, _ = child.communicate(timeout=30)
    assert child.returncode == 3
    assert len(out.splitlines()) == 505
    said = (tmp_path / "log").read_text()
    assert said.splitlines() == [
        "ValueError: No available memory for the cache blocks",
        "RuntimeError: Engine core initialization failed.",
    ]
    words = read_last_words(said)
    assert words is not None
    assert words.failure_class is FailureClass.KV_TOO_SMALL_FOR_MAX_LEN


def test_sigterm_goes_through_and_is_no_failure(tmp_path: Path) -> None:
    script = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "print('ready', flush=True)\n"
        "signal.pause()"
    )
    with launch(script, tmp_path / "log") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=30) == 0
    assert not (tmp_path / "log").exists()


def test_a_signal_that_killed_it_is_the_status(tmp_path: Path) -> None:
    child = launch("import os; os.kill(os.getpid(), 9)", tmp_path / "log")
    child.communicate(timeout=30)
    assert child.returncode == 137
