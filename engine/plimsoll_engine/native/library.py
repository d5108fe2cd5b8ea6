"""Compiles ``kernels.cpp`` for the processor at hand, once, and loads it.

In: the source beside this file and a C++ compiler (``CXX``, else c++ or g++). Out: the library, or
None with a line in the log that says why: plain torch computes then, more slowly. What was compiled
is kept by its source, compiler and processor, as Triton keeps its kernels: beside the source by
``python -m plimsoll_engine.native.library``, else under ``XDG_CACHE_HOME``; where nothing can be kept it is
compiled for one process. ``PLIMSOLL_CPU_KERNELS=torch`` does without.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
# Nothing here looks at errno or floating-point traps, and without both loops can be vectorized.
FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-fno-trapping-math"),
    *("-fPIC", "-shared", "-fopenmp"),
)
SWITCH = "PLIMSOLL_CPU_KERNELS"
_COMPILE_SECONDS = 120.0


@functools.cache
def load_library() -> ctypes.CDLL | None:
    # Its parallel loops run on the threads of torch's OpenMP: torch has loaded that before.
    if os.environ.get(SWITCH, "") == "torch":
        log.info("%s=torch: the CPU computes with plain torch", SWITCH)
        return None
    try:
        folder = cache_folder()
        path = ensure_compiled(folder)
        library = ctypes.CDLL(str(path))
        if path.parent not in (SOURCE.parent, folder):
            shutil.rmtree(path.parent, ignore_errors=True)
        return library
    except (OSError, subprocess.SubprocessError) as error:
        log.warning(
            "the CPU computes with plain torch, more slowly: its kernels cannot be compiled (%s); "
            "a C++ compiler with OpenMP is needed, such as the package g++",
            _tell(error),
        )
        return None


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "plimsoll" / "native"


def ensure_compiled(folder: Path) -> Path:
    """The library in ``folder``, compiled if it is not there. Raises OSError, SubprocessError."""
    compiler = find_compiler()
    name = f"kernels-{_fingerprint(compiler)}.so"
    for place in (SOURCE.parent, folder):
        if _is_safe(place / name):
            return place / name
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        own = folder
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        own = Path(tempfile.mkdtemp(prefix="plimsoll-native-"))
    # Others may compile the same at the same time: the last one's takes the place at once.
    with tempfile.NamedTemporaryFile(dir=own, suffix=".so", delete=False) as made:
        pass
    try:
        subprocess.run(
            [*compiler, *FLAGS, "-o", made.name, str(SOURCE)],
            check=True,
            capture_output=True,
            text=True,
            timeout=_COMPILE_SECONDS,
        )
        os.replace(made.name, own / name)
    except BaseException:
        Path(made.name).unlink(missing_ok=True)
        raise
    return own / name


def find_compiler() -> list[str]:
    """Raises OSError where there is none."""
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    for program in ("c++", "g++"):
        if found := shutil.which(program):
            return [found]
    raise FileNotFoundError("no C++ compiler: neither CXX is set nor is c++ or g++ on PATH")


def _fingerprint(compiler: list[str]) -> str:
    version = subprocess.run(
        [*compiler, "--version"], check=True, capture_output=True, text=True, timeout=10
    ).stdout
    parts = (SOURCE.read_text(), version, *compiler, *FLAGS, _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _processor() -> str:
    """What -march=native looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kinds = ("flags", "Features", "model name", "CPU part")
    told = {line for line in lines if line.startswith(kinds)}
    return "\n".join([platform.machine(), *sorted(told)])


def _is_safe(path: Path) -> bool:
    """Loading runs what is in a file, so nobody but its user and root may have put it there."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022


def _tell(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"{shlex.join(error.cmd[:1])}: {(error.stderr or '').strip()[-300:]}"
    return str(error)


def main() -> None:
    """Compiles beside the source, so that no engine has to. Without a compiler there is nothing to do."""
    try:
        print(f"the CPU's kernels: {ensure_compiled(SOURCE.parent).name}")
    except (OSError, subprocess.SubprocessError) as error:
        print(f"the CPU's kernels are not compiled, plain torch will do: {_tell(error)}")


if __name__ == "__main__":
    main()
