"""Namespaces of one's own: what runs in them, and what tells why they cannot be had."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plimsoll_local.namespace import check_available, explain
from plimsoll_local.processes import read_state

# Prints what pid 1 sees, with its sleeping child, and waits.
INSIDE = """
import os, socket, subprocess, sys, time
from plimsoll_local.namespace import run_isolated

def main():
    subprocess.Popen(["sleep", "600"])
    pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    print(os.getpid(), os.getuid(), len(pids), socket.gethostname(), os.readlink("/proc/self/ns/pid"), flush=True)
    time.sleep(float(sys.argv[1]))
    return 7

sys.exit(run_isolated(main))
"""


def start(seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", INSIDE, str(seconds)], stdout=subprocess.PIPE, text=True
    )


def members(namespace: str) -> list[int]:
    """Living processes of a pid namespace."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "ns" / "pid") == namespace:
                found += [int(entry.name)] if read_state(int(entry.name))[0] != "Z" else []
        except OSError:
            continue
    return found


@pytest.mark.timeout(120)
def test_the_function_is_pid_1_and_root_and_its_status_comes_back() -> None:
    process = start(0)
    output, _ = process.communicate(timeout=60)
    pid, uid, processes, host, namespace = output.split()
    assert (pid, uid, processes, host) == ("1", "0", "2", "plimsoll-local")
    assert process.returncode == 7
    # The function returned with a child still running: pid 1 took it along.
    assert members(namespace) == []


@pytest.mark.timeout(120)
def test_a_killed_caller_takes_the_whole_namespace_along() -> None:
    process = start(600)
    assert process.stdout is not None
    with process.stdout as output:
        namespace = output.readline().split()[-1]
        assert len(members(namespace)) == 2
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 30
        while members(namespace) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert members(namespace) == []


def test_they_can_be_had_here() -> None:
    check_available()


@pytest.mark.parametrize(
    ("switch", "value", "advice"),
    [
        ("user/max_user_namespaces", "0", "`sudo sysctl -w user.max_user_namespaces=10000`"),
        ("user/max_user_namespaces", "9000", "allowing user namespaces"),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "`sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`",
        ),
    ],
)
def test_the_advice_names_the_switch_that_refuses(
    tmp_path: Path, switch: str, value: str, advice: str
) -> None:
    (tmp_path / switch).parent.mkdir()
    (tmp_path / switch).write_text(f"{value}\n")
    message = explain("unshare: Operation not permitted", tmp_path)
    assert f"What helps: {advice}" in message
    assert "(unshare: Operation not permitted)" in message
    assert "kind, minikube" in message
