"""Child processes that never outlive their parent.

In: an argument vector and a log file. Out: a running child that the kernel kills when the parent
dies (PR_SET_PDEATHSIG), and a way to end it. Knows nothing of what it runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """To be called in the child. ``parent`` is the pid it was forked from: if that is already gone
    the signal would never come, so the child ends at once."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def tied_to(parent: int) -> Callable[[], None]:
    return lambda: die_with_parent(parent)


def start_child(
    arguments: Sequence[str | Path],
    log: Path,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a child with its output in ``log``.

    The kernel ties it to the calling *thread*: call this from one that lives as long as the child.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            [str(argument) for argument in arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment) if environment is not None else None,
            cwd=cwd,
            preexec_fn=tied_to(os.getpid()),  # noqa: PLW1509 - a single system call
        )


def stop_children(children: Sequence[subprocess.Popen[bytes]], grace_s: float = 5.0) -> None:
    """SIGTERM to all, newest first, then SIGKILL to what is left after ``grace_s`` each."""
    for child in reversed(children):
        if child.poll() is None:
            child.terminate()
    for child in reversed(children):
        try:
            child.wait(grace_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def read_tail(log: Path, lines: int = 15) -> str:
    if not log.exists():
        return "(no log)"
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def read_state(pid: int) -> tuple[str, int]:
    """State letter and start in clock ticks since boot (proc(5), fields 3 and 22), which name a
    process together with its pid. Raises OSError when there is no such process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])
