"""Case B20: a high uid that no passwd file knows, home ``/``, and a root that cannot be written.

The engine runs in a mount namespace whose file systems are all read-only but for what the test says.
To make one takes root.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2 as httpx
import pytest

from support.tiny_model import write_tiny_model

UID = "1000680000"
SECONDS = 120
# Everything read-only, a tmpfs for what a pod's volumes are, and no more rights than to read what the
# user who runs the tests can read (the interpreter may lie in a closed home).
RESTRICTED = f"""
set -eu
scratch=$1; shift
findmnt -rn -o TARGET -t nosysfs,noproc,nocgroup,nocgroup2,nodevtmpfs,nodevpts | sort -r |
while read -r mount; do mount -o remount,bind,ro "$mount" 2>/dev/null || true; done
if [ "$scratch" ]; then mount -t tmpfs -o mode=1777 tmpfs "$scratch"; fi
exec setpriv --reuid {UID} --regid {UID} --clear-groups --no-new-privs \\
    --bounding-set=-all,+dac_read_search --inh-caps=-all,+dac_read_search \\
    --ambient-caps=-all,+dac_read_search -- "$@"
"""

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="a mount namespace takes root")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def restricted(scratch: str, command: list[str], environment: dict[str, str]) -> list[str]:
    variables = [f"{name}={value}" for name, value in environment.items()]
    inner = ["env", "-i", *variables, *command]
    return ["unshare", "--mount", "bash", "-c", RESTRICTED, "b20", scratch, *inner]


@pytest.mark.parametrize("volumes", [True, False], ids=["with volumes", "nothing writable"])
def test_b20_an_unknown_uid_with_a_read_only_root_is_served(tmp_path: Path, volumes: bool) -> None:
    model = write_tiny_model(tmp_path / "model")
    before = sorted(path.name for path in model.iterdir())
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    # A volume's folder is open to the pod, and so is the way to it here.
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o755)
    port = free_port()
    environment = {"HOME": "/", "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    if volumes:
        for name in ("HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TMPDIR"):
            environment[name] = str(scratch if name == "TMPDIR" else scratch / name.lower())
    flags = [
        *("--model", str(model), "--served-model-name", "m", "--device", "cpu"),
        *("--device-memory", "2Gi", "--max-num-batched-tokens", "128", "--max-num-seqs", "4"),
        *("--host", "127.0.0.1", "--port", str(port), "--control-port", "0"),
    ]
    command = restricted(
        str(scratch) if volumes else "",
        [sys.executable, "-P", "-m", "plimsoll_engine", *flags],
        environment,
    )
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd="/") as engine,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        try:
            wait_until_ready(engine, client)
            with open(f"/proc/{engine.pid}/status") as status:
                assert f"Uid:\t{UID}" in status.read()
            body = {"model": "m", "prompt": "The sky", "max_tokens": 4, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 4
            assert "vllm:kv_cache_usage_perc" in client.get("/metrics").text
        finally:
            engine.terminate()
        _, error = engine.communicate(timeout=SECONDS)
        assert engine.returncode == 0, error
        assert "Traceback" not in error
    assert sorted(path.name for path in model.iterdir()) == before


def wait_until_ready(engine: subprocess.Popen[str], client: httpx.Client) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        assert engine.poll() is None, engine.stderr.read() if engine.stderr else ""
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.ConnectError:
            time.sleep(0.1)
    raise AssertionError("not ready in time")


def test_b20_the_root_is_really_closed(tmp_path: Path) -> None:
    """Or the test above would show nothing."""
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o755)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    tries = " ".join(
        f"if touch {folder}/b20 2>/dev/null; then echo {folder}; fi;"
        for folder in ("", "/tmp", "/var/tmp", "/dev/shm", tmp_path, scratch)
    )
    command = restricted(
        str(scratch), ["bash", "-c", tries], {"HOME": "/", "PATH": os.environ["PATH"]}
    )
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.stdout.split() == [str(scratch)], done.stderr
