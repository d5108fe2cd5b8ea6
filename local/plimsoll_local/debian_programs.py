"""Programs that tests want and Debian has: unpacked into the cache, without root.

In: PATH, the cache, and apt's own sources. Out: the path of a program, or the reason why it is not to
be had. promtool and alertmanager are taken this way: building them from Go takes minutes, a package
seconds. Nothing is installed on the machine, and apt's own lists are not touched.

``python -m plimsoll_local.debian_programs promtool`` makes one ready. Where that cannot be done it
says so and exits 0: what needs the program is skipped then, with the same reason.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from plimsoll_local.binaries import cache_home
from plimsoll_local.go_build import MissingTool

# For lists and one package of some 20 MB.
APT_TIMEOUT_S = 180


@dataclass(frozen=True)
class DebianProgram:
    name: str
    package: str
    # Inside of the package.
    path: str


PROGRAMS = {
    program.name: program
    for program in (
        DebianProgram("promtool", "prometheus", "usr/bin/promtool"),
        DebianProgram("prometheus", "prometheus", "usr/bin/prometheus"),
        DebianProgram("alertmanager", "prometheus-alertmanager", "usr/bin/prometheus-alertmanager"),
    )
}


def find_program(name: str) -> Path | None:
    """On PATH, else in the cache, else None. KeyError for a name that is not in PROGRAMS."""
    program = PROGRAMS[name]
    for candidate in (name, Path(program.path).name):
        on_path = shutil.which(candidate)
        if on_path is not None:
            return Path(on_path)
    unpacked = _folder(program) / program.path
    return unpacked if os.access(unpacked, os.X_OK) else None


def ensure_program(name: str) -> Path:
    """Raises MissingTool: no apt here, no package, or no way to Debian's archive."""
    found = find_program(name)
    if found is not None:
        return found
    program = PROGRAMS[name]
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise MissingTool(
                f"{name} is not on PATH, and there is no {tool} to take it out of the Debian package "
                f"{program.package} with"
            )
    home = cache_home() / "debian"
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home, prefix=".draft-") as draft:
        unpacked = _unpack(program, Path(draft))
        shutil.rmtree(_folder(program), ignore_errors=True)
        unpacked.rename(_folder(program))
    return _folder(program) / program.path


def _folder(program: DebianProgram) -> Path:
    return cache_home() / "debian" / program.package


def _unpack(program: DebianProgram, work: Path) -> Path:
    # Lists of our own: the machine's may be empty or old, and are root's.
    for folder in ("lists/partial", "cache/archives/partial"):
        (work / folder).mkdir(parents=True)
    apt = [
        "apt-get",
        "-q",
        "-o",
        f"Dir::State::Lists={work}/lists",
        "-o",
        f"Dir::Cache={work}/cache",
    ]
    apt += [
        "-o",
        "Debug::NoLocking=1",
        "-o",
        "APT::Sandbox::User=",
        "-o",
        "Acquire::Languages=none",
    ]
    _run([*apt, "update"], work, f"Debian's package lists for {program.name}")
    _run([*apt, "download", program.package], work, f"the Debian package {program.package}")
    (package,) = work.glob("*.deb")
    _run(
        ["dpkg-deb", "-x", str(package), str(work / "unpacked")], work, f"unpacking {package.name}"
    )
    return work / "unpacked"


def _run(command: list[str], folder: Path, what: str) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=APT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise MissingTool(f"{what} did not come within {APT_TIMEOUT_S} s") from error
    if done.returncode:
        words = done.stderr.strip().splitlines() or ["no words"]
        raise MissingTool(f"{what}: {command[0]} exited {done.returncode}: {words[-1]}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="plimsoll_local.debian_programs", description=__doc__)
    parser.add_argument("names", nargs="+", choices=sorted(PROGRAMS))
    for name in parser.parse_args(arguments).names:
        try:
            print(f"{name}: {ensure_program(name)}")
        except MissingTool as missing:
            print(f"{name} is NOT to be had here, tests that need it are skipped: {missing}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
