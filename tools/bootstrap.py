"""Makes a checkout ready to use: uv, the locked environment in .venv, the control plane's programs.

Needs Python 3.11 or newer, a C compiler and the package registries, and nothing else; uses the
standard library alone, since it runs before anything is installed. Every step says what it does and
how long it took; what is there already takes seconds. The durations of downloads and of builds go to
.venv/bootstrap.json, where the demo reads them.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV_VERSION = "0.13.9"
ENVIRONMENT = ROOT / ".venv"
STAMP = ENVIRONMENT / "bootstrap.json"
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
    return 0


def prepare() -> None:
    key = environment_key()
    durations = read_stamp()
    if durations.get("key") != key:
        check_disk()
        check_compiler()
        started = time.monotonic()
        uv = find_uv()
        os.environ["UV"] = str(uv)
        follow(
            "installing the locked environment (about 3 GB to download the first time)",
            [uv, "sync", "--frozen", "--all-extras", "--python", sys.executable],
            measure=lambda: folder_progress(ENVIRONMENT),
        )
        durations = {"key": key, "downloads_s": time.monotonic() - started, "builds_s": 0.0}
    started = time.monotonic()
    follow(
        "finding or building the control plane's programs",
        [ENVIRONMENT / "bin" / "python", "-m", "plimsoll_local.binaries"],
    )
    took = time.monotonic() - started
    # A look that finds everything is no build, and must not hide how long the build took.
    if took > 5:
        durations["builds_s"] = took
    STAMP.write_text(json.dumps(durations))
    say(
        f"ready; the first time took {durations['downloads_s']:.0f} s for downloads and "
        f"installation and {durations['builds_s']:.0f} s for builds"
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


def read_stamp() -> dict[str, object]:
    if not (ENVIRONMENT / "bin" / "python").exists() or not STAMP.exists():
        return {}
    try:
        stamp: dict[str, object] = json.loads(STAMP.read_text())
    except ValueError:
        return {}
    return stamp


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
    status = subprocess.run([str(part) for part in command], cwd=ROOT, check=False).returncode
    done.set()
    teller.join()
    if status:
        raise Missing(f"{what} failed with status {status}; the lines above say why")
    say(f"{what}: done in {time.monotonic() - started:.0f} s")


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
