"""The control plane's programs: found, or built once from pinned Go modules into the cache.

In: nothing but the environment. Out: the paths of etcd, kube-apiserver, kube-controller-manager,
kube-scheduler, kubectl and helm. Looked for in KUBEBUILDER_ASSETS, then in the cache, then on PATH
(where only the pinned release counts); whatever is missing is built from ``modules/`` (go_build.py).
This module knows nothing of how the programs are started.

``python -m plimsoll_local.binaries`` makes them ready and says where they are.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from plimsoll_local.go_build import Durations, GoBuild, MissingTool, Program

__all__ = ["Binaries", "MissingTool", "cache_home", "ensure_binaries", "find_binaries"]

KUBERNETES_VERSION = "v1.36.3"
MODULES = Path(__file__).parent / "modules"

_VERSION_PACKAGE = "k8s.io/component-base/version"
_KUBERNETES_LDFLAGS = (
    f"-s -w -X {_VERSION_PACKAGE}.gitVersion={KUBERNETES_VERSION}"
    f" -X {_VERSION_PACKAGE}.gitMajor=1 -X {_VERSION_PACKAGE}.gitMinor=36"
)


def kubernetes_program(name: str, cold_s: float) -> Program:
    package = f"k8s.io/kubernetes/cmd/{name}"
    return Program(name, "kubernetes", package, _KUBERNETES_LDFLAGS, (1, 36), cold_s)


PROGRAMS = (
    kubernetes_program("kube-apiserver", 257),
    kubernetes_program("kube-controller-manager", 75),
    kubernetes_program("kube-scheduler", 6),
    kubernetes_program("kubectl", 30),
    Program("etcd", "etcd", "go.etcd.io/etcd/server/v3", "-s -w", (3, 6), 76),
    Program("helm", "helm", "helm.sh/helm/v4/cmd/helm", "-s -w", (4,), 150),
)


@dataclass(frozen=True)
class Binaries:
    etcd: Path
    kube_apiserver: Path
    kube_controller_manager: Path
    kube_scheduler: Path
    kubectl: Path
    helm: Path

    def describe(self) -> str:
        """Which folder each comes from, for people."""
        folders: dict[Path, list[str]] = {}
        for path in astuple(self):
            folders.setdefault(path.parent, []).append(path.name)
        if len(folders) == 1:
            return f"all {len(PROGRAMS)} programs from {next(iter(folders))}"
        return "; ".join(f"{', '.join(names)} from {folder}" for folder, names in folders.items())


def cache_home() -> Path:
    """PLIMSOLL_HOME, or the user's cache folder."""
    configured = os.environ.get("PLIMSOLL_HOME")
    if configured:
        return Path(configured).absolute()
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
    found = {program.name.replace("-", "_"): _find(program) for program in PROGRAMS}
    present = {name: path for name, path in found.items() if path is not None}
    return Binaries(**present) if len(present) == len(PROGRAMS) else None


def ensure_binaries(
    report: Callable[[str], None] = lambda line: print(line, flush=True),
    spent: Callable[[Durations], None] = lambda durations: None,
) -> Binaries:
    """Finds or builds every program.

    ``report`` gets a line of progress now and then; ``spent`` is told, when anything was built,
    what downloading and building took. Raises MissingTool: no Go toolchain, no modules, or a
    failed build; the message says what to do.
    """
    found = find_binaries()
    if found is not None:
        return found
    home = cache_home()
    home.mkdir(parents=True, exist_ok=True)
    with _locked(home / "build.lock", report):
        folder = home / "bin" / cache_key()
        folder.mkdir(parents=True, exist_ok=True)
        # Another process may have built them while this one waited.
        missing = [program for program in PROGRAMS if _find(program) is None]
        if missing:
            spent(GoBuild(MODULES, home, report).run(missing, folder))
    built = find_binaries()
    if built is None:
        raise MissingTool(f"the programs were built but are not all in {folder}")
    return built


def _find(program: Program) -> Path | None:
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    folders = [*([Path(assets)] if assets else []), cache_home() / "bin" / cache_key()]
    for folder in folders:
        if os.access(folder / program.name, os.X_OK):
            return folder / program.name
    on_path = shutil.which(program.name)
    if on_path is not None and _release(Path(on_path), program) == program.release:
        return Path(on_path)
    return None


def _release(path: Path, program: Program) -> tuple[int, ...]:
    """As many numbers of its version as the pinned release has; empty when it does not say."""
    ask = {"kubectl": ("version", "--client"), "helm": ("version", "--short")}
    try:
        printed = subprocess.run(
            [path, *ask.get(program.name, ("--version",))],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = re.search(r"(\d+)\.(\d+)\.\d+", printed)
    return tuple(map(int, match.groups()))[: len(program.release)] if match else ()


@contextmanager
def _locked(path: Path, report: Callable[[str], None]) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another process is building the control plane; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(prog="plimsoll_local.binaries", description=__doc__)
    parser.add_argument(
        "--durations", type=Path, help="a JSON file for what downloads and builds took, if any"
    )
    file: Path | None = parser.parse_args().durations

    def keep(durations: Durations) -> None:
        if file is not None:
            file.write_text(json.dumps(asdict(durations)))

    try:
        binaries = ensure_binaries(spent=keep)
    except MissingTool as missing:
        print(f"plimsoll: {missing}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        # Who started this says so.
        return 130
    print(f"control plane: {binaries.describe()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
