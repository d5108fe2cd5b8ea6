"""Makes the files that are made from others: the chart's CRDs and the Python of the .proto files.

In: crds/*.yaml and wire/**/*.proto. Out: charts/plimsoll/files/crds/ and the modules beside each
.proto. ``python tools/generate.py`` writes them; ``--check`` writes nothing, names what differs and
exits 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent.parent
CRDS = Path("crds")
CHART_CRDS = Path("charts/plimsoll/files/crds")
WIRE = Path("wire")

HEADER = "# Generated from {source} by tools/generate.py: edit that one.\n"
# Uninstalling the chart must not delete the definitions, and with them every object.
KEEP = "  annotations:\n    helm.sh/resource-policy: keep\n"


def chart_crd(source: Path, text: str) -> str:
    """The definition as the chart has it. Raises ValueError when its form is not the expected one."""
    name = f"  name: {source.stem}\n"
    if text.count(name) != 1 or "{{" in text:
        raise ValueError(f"{source}: expected `{name.strip()}` once, and no template braces")
    return HEADER.format(source=source) + text.replace(name, name + KEEP)


def wire_modules(root: Path) -> dict[Path, str]:
    """Path from the root -> text of every module made from a .proto."""
    wire = root / WIRE
    protos = sorted(path.relative_to(wire) for path in wire.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as out:
        # protoc imports by path: run from wire/, so that the stubs import plimsoll_wire.x_pb2.
        options = (f"--{kind}={out}" for kind in ("python_out", "pyi_out", "grpc_python_out"))
        arguments = ["protoc", f"-I{wire}", *options, *(str(wire / proto) for proto in protos)]
        if protoc.main(arguments) != 0:
            raise ValueError(f"protoc failed on {', '.join(map(str, protos))}")
        made = (path for path in Path(out).rglob("*") if path.is_file())
        return {WIRE / path.relative_to(out): path.read_text() for path in made}


def wanted_files(root: Path) -> dict[Path, str]:
    """Path from the root -> text of every generated file."""
    crds = {
        CHART_CRDS / path.name: chart_crd(path.relative_to(root), path.read_text())
        for path in sorted((root / CRDS).glob("*.yaml"))
    }
    return crds | wire_modules(root)


def differences(root: Path, wanted: Mapping[Path, str]) -> list[Path]:
    """Files that are missing, differ, or have lost their source."""
    changed = [
        path
        for path, text in wanted.items()
        if not (root / path).is_file() or (root / path).read_text() != text
    ]
    present = {path.relative_to(root) for path in (root / CHART_CRDS).glob("*")}
    return sorted([*changed, *(present - wanted.keys())])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    options = parser.parse_args(arguments)
    wanted = wanted_files(ROOT)
    stale = differences(ROOT, wanted)
    if options.check:
        for path in stale:
            print(f"{path} is stale: run make generate", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        if path in wanted:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(wanted[path])
        else:
            (ROOT / path).unlink()
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
