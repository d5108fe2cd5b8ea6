"""Containers run for real, without a cluster: each scenario prints what it saw as JSON.

Run as ``python -m support.container_scenarios NAME DIRECTORY``; it makes the namespaces that the
node agent lives in and runs the scenario as root there. Tests call :func:`run_scenario`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from plimsoll_local.agent.container import BindMount, ContainerSpec, Exited
from plimsoll_local.agent.linux import Mount, mount
from plimsoll_local.agent.process import Container, start_container
from plimsoll_local.namespace import run_isolated

Json = dict[str, Any]
MEBIBYTE = 1 << 20


# A checkout below /tmp has its environment there, where a container has a folder of its own.
INTERPRETER = (sys.prefix, sys.base_prefix)


def run_scenario(name: str, directory: Path) -> Json:
    """Runs one scenario in namespaces of its own; fails with its output if it fails."""
    result = subprocess.run(
        [sys.executable, "-m", "support.container_scenarios", name, str(directory)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert result.returncode == 0, result.stderr
    found: Json = json.loads(result.stdout)
    return found


def build_spec(directory: Path, *argv: str, **fields: Any) -> ContainerSpec:
    home = Path(tempfile.mkdtemp(dir=directory))
    for part in ("root", "scratch"):
        (home / part).mkdir()
    (home / "log").touch()
    spec = ContainerSpec(
        argv=argv,
        env={"PATH": os.environ["PATH"], "HOME": "/tmp"},
        working_directory="/",
        host_name="pod-0",
        network_namespace=None,
        root=str(home / "root"),
        scratch=str(home / "scratch"),
        log_file=str(home / "log"),
        hidden=(str(directory),),
        readable=INTERPRETER,
    )
    return replace(spec, **fields)


def run_python(directory: Path, program: str, **fields: Any) -> ContainerSpec:
    return build_spec(directory, sys.executable, "-c", program, **fields)


async def start(spec: ContainerSpec) -> Container:
    container = await start_container(spec, Path(spec.root).parent)
    assert isinstance(container, Container), container
    return container


async def run_to_end(spec: ContainerSpec) -> Exited:
    return await (await start(spec)).exited


def read_output(spec: ContainerSpec) -> list[str]:
    lines = Path(spec.log_file).read_text().splitlines()
    return [line.split(" ", 3)[3] for line in lines]


async def allocation(directory: Path) -> Json:
    """600 MiB/s, as fast as an engine fills its pages; the limit is 400 MiB."""
    program = """
import time
held, began = [], time.monotonic()
while True:
    held.append(bytearray(b"x") * (6 << 20))
    time.sleep(max(0, began + len(held) * 0.01 - time.monotonic()))
"""
    limit = 400 * MEBIBYTE
    ended = await run_to_end(run_python(directory, program, memory_limit=limit))
    return {**asdict(ended), "limit": limit}


async def sharing(directory: Path) -> Json:
    """200 MiB that forks share, and that a vfork shows twice, stay below a limit of 300 MiB."""
    program = """
import os, subprocess, time
held = bytearray(b"x") * (200 << 20)
children = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        time.sleep(1.0)
        os._exit(0)
    children.append(pid)
for pid in children:
    os.waitpid(pid, 0)
for _ in range(50):
    subprocess.run(["true"], check=True)
print("survived")
"""
    spec = run_python(directory, program, memory_limit=300 * MEBIBYTE)
    ended = await run_to_end(spec)
    return {**asdict(ended), "output": read_output(spec)}


async def unsharing(directory: Path) -> Json:
    """The same forks, each writing to its copy: 800 MiB in truth."""
    program = """
import os, time
held = bytearray(b"x") * (200 << 20)
for _ in range(3):
    if os.fork() == 0:
        for index in range(0, len(held), 4096):
            held[index] = 1
        time.sleep(30)
        os._exit(0)
time.sleep(30)
"""
    return asdict(await run_to_end(run_python(directory, program, memory_limit=300 * MEBIBYTE)))


async def memory_files(directory: Path) -> Json:
    """Files in a memory volume count, though no process has them mapped."""
    volume = directory / "volume"
    volume.mkdir()
    mount("tmpfs", str(volume), "tmpfs", Mount.NO_SUID, "size=500m")
    spec = build_spec(
        directory,
        *("sh", "-c", "dd if=/dev/zero of=/cache/file bs=1M count=200; sleep 30"),
        mounts=(BindMount(str(volume), "/cache"),),
        shared_memory=(str(volume),),
        memory_limit=100 * MEBIBYTE,
    )
    return asdict(await run_to_end(spec))


async def file_system(directory: Path) -> Json:
    """What a container sees and may write; a mount point that this machine does not have."""
    for name in ("volume", "visible", "shown"):
        (directory / name).mkdir()
    (directory / "hosts").write_text("1.2.3.4 here\n")
    (directory / "message").touch()
    program = f"""
import os
def can_write(path):
    try:
        open(path + "/probe", "w").close()
    except OSError as error:
        return error.strerror
    return "yes"
print(os.uname().nodename)
print(open("/etc/hosts").read().strip())
print(can_write("/usr"))
print(can_write("/tmp"))
print(can_write("/not/on/this/machine"))
print(can_write("/not/on/this/machine/nested"))
print(can_write({str(directory / "visible")!r}))
print(can_write({str(directory / "shown")!r}))
print(os.path.exists({str(directory / "hosts")!r}))
print(os.getpid(), sorted(int(n) for n in os.listdir("/proc") if n.isdigit()))
open("/dev/termination-log", "w").write("the end")
"""
    volume = str(directory / "volume")
    spec = run_python(
        directory,
        program,
        mounts=(
            BindMount(str(directory / "hosts"), "/etc/hosts"),
            BindMount(str(directory / "message"), "/dev/termination-log"),
            BindMount(volume, "/not/on/this/machine"),
            BindMount(volume, "/not/on/this/machine/nested", read_only=True),
        ),
        writable=(str(directory / "visible"),),
        readable=(*INTERPRETER, str(directory / "shown")),
    )
    ended = await run_to_end(spec)
    return {
        "exit_code": ended.exit_code,
        "output": read_output(spec),
        "message": (directory / "message").read_text(),
        "on_the_machine": os.path.exists("/not"),  # noqa: ASYNC240
    }


async def endings(directory: Path) -> Json:
    """Exit codes: own, by a handled and an unhandled SIGTERM, by SIGKILL, never started."""
    own = await run_to_end(build_spec(directory, "sh", "-c", "exit 3"))
    handles = "trap 'exit 143' TERM; echo up; while :; do sleep 0.05; done"
    codes = {"own": own.exit_code}
    for name, program, number in (
        ("term", handles, signal.SIGTERM),
        ("kill", handles, signal.SIGKILL),
        # The first process of a pid namespace ignores what it has no handler for.
        ("ignored", "echo up; while :; do sleep 0.05; done", signal.SIGTERM),
    ):
        spec = build_spec(directory, "sh", "-c", program)
        container = await start(spec)
        await _until(lambda spec=spec: read_output(spec))  # type: ignore[misc]
        container.signal(number)
        try:
            codes[name] = (await asyncio.wait_for(asyncio.shield(container.exited), 1)).exit_code
        except TimeoutError:
            codes[name] = -1
            container.signal(signal.SIGKILL)
            await container.exited
    spec = build_spec(directory, "no-such-program")
    failed = await start_container(spec, Path(spec.root).parent)
    return {"codes": codes, "failed": str(getattr(failed, "message", failed))}


async def execution(directory: Path) -> Json:
    """A further program in a running container: its output, exit code and timeout."""
    spec = build_spec(directory, "sh", "-c", "echo hello > /tmp/file; echo up; sleep 30")
    container = await start(spec)
    await _until(lambda: read_output(spec))
    found = await container.execute(("cat", "/tmp/file"), 10)
    failing = await container.execute(("sh", "-c", "exit 4"), 10)
    missing = await container.execute(("no-such-program",), 10)
    try:
        await container.execute(("sleep", "20"), 0.5)
        timed_out = False
    except TimeoutError:
        timed_out = True
    container.signal(signal.SIGKILL)
    await container.exited
    return {
        "output": found.output,
        "failing": failing.exit_code,
        "missing": missing.exit_code,
        "timed_out": timed_out,
    }


async def orphans(directory: Path) -> Json:
    """An agent that is killed takes its containers along, and all their processes."""
    marker = "86399"
    program = f"sleep {marker} & setsid sleep {marker} & echo up; exec sleep {marker}"
    spec = build_spec(directory, "sh", "-c", program)
    # A parent of its own stands for the agent.
    reader, writer = os.pipe()
    agent = os.fork()
    if agent == 0:
        os.close(reader)
        asyncio.run(_hold(spec, writer))
        os._exit(0)
    os.close(writer)
    await asyncio.to_thread(os.read, reader, 1)
    await _until(lambda: _count(marker) == 3)
    before = _count(marker)
    os.kill(agent, signal.SIGKILL)
    await asyncio.to_thread(os.waitpid, agent, 0)
    await _until(lambda: not _count(marker))
    return {"before": before, "after": _count(marker)}


async def _hold(spec: ContainerSpec, writer: int) -> None:
    container = await start(spec)
    await _until(lambda: read_output(spec))
    os.write(writer, b"x")
    await container.exited


async def _until(holds: Callable[[], object]) -> None:
    """Waits for something outside this process: only looking tells."""
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def _count(marker: str) -> int:
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            count += arguments[:2] == [b"sleep", marker.encode()]
    return count


SCENARIOS: dict[str, Callable[[Path], Awaitable[Json]]] = {
    scenario.__name__: scenario
    for scenario in (
        allocation,
        sharing,
        unsharing,
        memory_files,
        file_system,
        endings,
        execution,
        orphans,
    )
}


async def _print(name: str, directory: Path) -> None:
    print(json.dumps(await SCENARIOS[name](directory)), flush=True)


def main() -> int:
    name, directory = sys.argv[1:]

    def inside() -> int:
        asyncio.run(_print(name, Path(directory)))
        return 0

    return run_isolated(inside)


if __name__ == "__main__":
    sys.exit(main())
