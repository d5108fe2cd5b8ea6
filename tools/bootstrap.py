"""Makes a checkout ready to use: uv, the locked environment in .venv, the control plane's programs
and promtool.

Needs Python 3.11 or newer, a C compiler and the package registries, and nothing else; uses the
standard library alone, since it runs before anything is installed. Every step says what it does and
how long it took; what is there already takes seconds. What downloads and builds took is kept apart,
in seconds, in .venv/bootstrap.json: environment_s (uv sync), downloads_s (Go and its modules) and
builds_s (the control plane's programs), each as of the last time it was needed.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
UV_VERSION = "0.13.9"
ENVIRONMENT = ROOT / ".venv"
STAMP = ENVIRONMENT / "bootstrap.json"
BUILD = ENVIRONMENT / "build.json"
# Free space for the environment with its CUDA libraries, Go's caches and the programs.
NEEDED_GIB = 15


class Missing(Exception):
    """Something that has to be there and is not; the message says how to get it."""


def main() -> int:
    try:
        prepare()
    except Missing as missing:
        print(f"\nplimsoll: {missing}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nplimsoll: stopped; the next run goes on from here", file=sys.stderr)
        return 130
    return 0


def prepare() -> None:
    key = environment_key()
    stamp = read_stamp()
    # Also when everything is installed: a Go toolchain is fetched with it.
    uv = find_uv()
    os.environ["UV"] = str(uv)
    if stamp.get("key") != key:
        if not ENVIRONMENT.exists():
            check_disk()
        check_compiler()
        started = time.monotonic()
        follow(
            "installing the locked environment (about 3 GB to download the first time)",
            # Compiled once: each engine would otherwise compile torch anew where Python must not.
            [
                *(uv, "sync", "--frozen", "--all-extras", "--compile-bytecode"),
                *("--python", sys.executable),
            ],
            measure=lambda: folder_progress(ENVIRONMENT),
        )
        stamp |= {"key": key, "environment_s": time.monotonic() - started}
        write_stamp(stamp)
    follow(
        "looking for the control plane's programs, building what is missing",
        [ENVIRONMENT / "bin" / "python", "-m", "plimsoll_local.binaries", "--durations", BUILD],
    )
    follow(
        "looking for the CPU's kernels, compiling them if they are missing",
        [ENVIRONMENT / "bin" / "python", "-m", "plimsoll_engine.native.library"],
    )
    follow(
        "looking for promtool, which tries the alerts",
        [ENVIRONMENT / "bin" / "python", "-m", "plimsoll_local.debian_programs", "promtool"],
    )
    if BUILD.exists():
        # Written only when something was built, so a look that finds all leaves the last figures.
        stamp |= json.loads(BUILD.read_text())
        BUILD.unlink()
    write_stamp(stamp)
    downloads = float(stamp.get("environment_s", 0)) + float(stamp.get("downloads_s", 0))
    say(
        f"ready; setting up took {downloads:.0f} s for downloads and installation and "
        f"{float(stamp.get('builds_s', 0)):.0f} s for builds when it was last needed"
    )


def say(line: str) -> None:
    print(f"[setup] {line}", flush=True)


def environment_key() -> str:
    """Changes when the environment has to be synchronised again."""
    digest = hashlib.sha256()
    for name in ("uv.lock", "pyproject.toml"):
        digest.update((ROOT / name).read_bytes())
    digest.update(str(ENVIRONMENT).encode())
    return digest.hexdigest()


def read_stamp() -> dict[str, Any]:
    if not (ENVIRONMENT / "bin" / "python").exists() or not STAMP.exists():
        return {}
    try:
        stamp = json.loads(STAMP.read_text())
    except ValueError:
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(stamp: dict[str, Any]) -> None:
    STAMP.write_text(json.dumps(stamp))


def cache_home() -> Path:
    """As plimsoll_local.binaries.cache_home, which cannot be imported yet."""
    configured = os.environ.get("PLIMSOLL_HOME")
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plimsoll"


def check_disk() -> None:
    free = shutil.disk_usage(ROOT).free / 2**30
    if free < NEEDED_GIB:
        raise Missing(f"{NEEDED_GIB} GiB of disk are needed in {ROOT}; {free:.1f} GiB are free")


def check_compiler() -> None:
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        raise Missing(
            "a C compiler is needed (Triton builds its launchers with it) and none of cc, gcc and "
            "clang is on PATH; on Debian: apt-get install gcc libc6-dev"
        )


def find_uv() -> Path:
    """The uv on PATH when it is as new as the pinned one, else the pinned one in the cache."""
    on_path = shutil.which("uv")
    if on_path is not None and read_version(on_path) >= parse_version(UV_VERSION):
        return Path(on_path)
    folder = cache_home() / "uv" / UV_VERSION
    uv = folder / "bin" / "uv"
    if not uv.exists():
        say(f"fetching uv {UV_VERSION} into {folder}")
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=False)
        if made.returncode:
            raise Missing(
                "this Python cannot make virtual environments; on Debian: apt-get install "
                "python3-venv"
            )
        installed = subprocess.run(
            [folder / "bin" / "python", "-m", "pip", "install", "-q", f"uv=={UV_VERSION}"],
            check=False,
        )
        if installed.returncode:
            raise Missing(
                f"uv {UV_VERSION} could not be installed with pip: is the Python package index "
                "reachable from here (a proxy, an index setting)?"
            )
    return uv


def read_version(uv: str) -> tuple[int, ...]:
    answer = subprocess.run([uv, "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"\d+(\.\d+)+", answer.stdout)
    return parse_version(match[0]) if match else (0,)


def parse_version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def follow(what: str, command: list[str | Path], measure: Callable[[], str] = lambda: "") -> None:
    """Runs a command with its output shown, and says every 15 s that it goes on and how far."""
    say(what)
    started = time.monotonic()
    done = threading.Event()

    def tell() -> None:
        while not done.wait(15):
            say(f"{what}: {time.monotonic() - started:.0f} s so far{measure()}")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    process = subprocess.Popen([str(part) for part in command], cwd=ROOT, stdin=subprocess.DEVNULL)
    try:
        status = process.wait()
    except KeyboardInterrupt:
        stop(process)
        raise
    finally:
        done.set()
    teller.join()
    if status:
        raise Missing(f"{what} failed with status {status}; the lines above say why")
    say(f"{what}: done in {time.monotonic() - started:.0f} s")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends an interrupted command. A terminal interrupts it too, so that it is not told a second
    time at once; what it started itself it ends when it is let."""
    try:
        for patience_s in (2, 20):
            try:
                process.wait(patience_s)
                return
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
        process.wait(5)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass
    finally:
        process.kill()
        process.wait()


def folder_progress(folder: Path) -> str:
    """Size of what is installed so far, against the 6 GiB that the environment has in the end."""
    used = sum(
        os.lstat(os.path.join(root, name)).st_size
        for root, _, names in os.walk(folder)
        for name in names
        if os.path.lexists(os.path.join(root, name))
    )
    return f", {used / 2**30:.1f} of about 6 GiB in place"


if __name__ == "__main__":
    sys.exit(main())
