"""Makes the files that are made from others: the chart's CRDs and README, the manifest that is the
chart rendered, the API reference, and the Python of the .proto files.

In: crds/*.yaml, wire/**/*.proto and charts/plimsoll. Out: charts/plimsoll/files/crds/ and README.md,
manifests/install.yaml, the operator package's copy of the definitions, docs/{api,metrics,dependencies}.md,
manifests/argocd/configmap-patch.yaml and the modules beside each .proto. ``python tools/generate.py`` writes
them; ``--check`` writes nothing, names what differs and exits 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from grpc_tools import protoc  # type: ignore[import-untyped]

from plimsoll_local.binaries import find_binaries

# PYTHONSAFEPATH keeps a script's own folder off the path.
sys.path.insert(0, str(Path(__file__).resolve().parent))
from chart_reference import CHART, chart_readme, install_manifest
from dependencies import dependencies_page
from metrics_reference import metrics_reference

ROOT = Path(__file__).resolve().parent.parent
CRDS = Path("crds")
CHART_CRDS = Path("charts/plimsoll/files/crds")
# For the command line, which checks manifests and clusters by them.
PACKAGE_CRDS = Path("operator/plimsoll_operator/crds")
WIRE = Path("wire")
REFERENCE = Path("docs/api.md")
METRICS = Path("docs/metrics.md")
DEPENDENCIES = Path("docs/dependencies.md")
ARGO_SCRIPT = Path("manifests/argocd/llmdeployment-health.lua")
ARGO_PATCH = Path("manifests/argocd/configmap-patch.yaml")
CHART_README = CHART / "README.md"
INSTALL = Path("manifests/install.yaml")

HEADER = "# Generated from {source} by tools/generate.py: edit that one.\n"
# Uninstalling the chart must not delete the definitions, and with them every object.
KEEP = "  annotations:\n    helm.sh/resource-policy: keep\n"


def chart_crd(source: Path, text: str) -> str:
    """The definition as the chart has it. Raises ValueError when its form is not the expected one."""
    name = f"  name: {source.stem}\n"
    if text.count(name) != 1 or "{{" in text:
        raise ValueError(f"{source}: expected `{name.strip()}` once, and no template braces")
    return HEADER.format(source=source) + text.replace(name, name + KEEP)


def api_reference(definitions: list[dict[str, Any]]) -> str:
    """Markdown: a table of fields for each kind and version, and the rules over several fields."""
    lines = [
        "# API reference",
        "",
        "Generated from crds/ by tools/generate.py. The same is in `kubectl explain --recursive`.",
    ]
    for definition in definitions:
        spec = definition["spec"]
        for version in spec["versions"]:
            schema = version["schema"]["openAPIV3Schema"]
            fields = list(walk_fields(schema))
            lines += [
                "",
                f"## {spec['names']['kind']}, {spec['group']}/{version['name']}",
                "",
                f"{flow(schema.get('description', ''))} Scope: {spec['scope']}.",
                "",
                "| field | type | default | allowed | meaning |",
                "|---|---|---|---|---|",
                *(field_row(path, field) for path, field in fields),
            ]
            rules = [
                f"| {code(path or '(whole)')} | {refusal(rule)} |"
                for path, field in [("", schema), *fields]
                for rule in field.get("x-kubernetes-validations", ())
            ]
            if rules:
                lines += ["", "| rule of | refused with |", "|---|---|", *rules]
    return "\n".join(lines) + "\n"


def walk_fields(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field below spec and status with its path, depth first, in the schema's order."""
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        if here in ("apiVersion", "kind", "metadata"):
            continue
        yield here, field
        yield from walk_fields(field, here)
        yield from walk_fields(field.get("items", {}), f"{here}[]")
        values = field.get("additionalProperties")
        if isinstance(values, dict):
            yield from walk_fields(values, f"{here}.*")


def field_row(path: str, field: Mapping[str, Any]) -> str:
    default = code(json.dumps(field["default"])) if "default" in field else ""
    cells = (
        code(path),
        type_of(field),
        default,
        allowed(field),
        flow(field.get("description", "")),
    )
    return f"| {' | '.join(cells)} |"


def type_of(field: Mapping[str, Any]) -> str:
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if field.get("type") == "array":
        return f"list of {type_of(field['items'])}"
    values = field.get("additionalProperties")
    return f"map to {type_of(values)}" if isinstance(values, dict) else field.get("type", "any")


def allowed(field: Mapping[str, Any]) -> str:
    """What the schema lets through, apart from the rules over several fields."""
    parts = []
    if "enum" in field:
        parts.append(", ".join(code(str(value)) for value in field["enum"]))
    for key, sign in (("minimum", ">="), ("maximum", "<=")):
        if key in field:
            strict = field.get(f"exclusive{key.capitalize()}")
            parts.append(f"{sign.rstrip('=') if strict else sign} {field[key]}")
    if "pattern" in field:
        parts.append(code(field["pattern"].replace("|", "\\|")))
    for key, words in (
        ("minLength", "at least {} characters"),
        ("maxLength", "at most {} characters"),
        ("minItems", "at least {} items"),
        ("maxItems", "at most {} items"),
        ("maxProperties", "at most {} entries"),
    ):
        if key in field:
            parts.append(words.format(field[key]))
    return "; ".join(parts)


def refusal(rule: Mapping[str, Any]) -> str:
    """What the API server answers with: the rule's message, else the rule itself."""
    return flow(rule["message"]) if "message" in rule else code(flow(rule["rule"]))


def code(text: str) -> str:
    return f"`{text}`"


def flow(text: str) -> str:
    """One line that does not end a table's cell."""
    return " ".join(text.split()).replace("|", "\\|")


def argo_patch(script: str) -> str:
    """For the ConfigMap argocd-cm: the script under the key where Argo CD looks for it."""
    lines = "".join(f"    {line}".rstrip() + "\n" for line in script.splitlines())
    return (
        HEADER.format(source=ARGO_SCRIPT)
        + "data:\n  resource.customizations.health.plimsoll.dev_LLMDeployment: |\n"
        + lines
    )


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
    texts = {path: path.read_text() for path in sorted((root / CRDS).glob("*.yaml"))}
    crds = {
        CHART_CRDS / path.name: chart_crd(path.relative_to(root), text)
        for path, text in texts.items()
    }
    packaged = {
        PACKAGE_CRDS / path.name: HEADER.format(source=path.relative_to(root)) + text
        for path, text in texts.items()
    }
    reference = {REFERENCE: api_reference([yaml.safe_load(text) for text in texts.values()])}
    return crds | packaged | reference | wire_modules(root)


def reference_files(root: Path) -> dict[Path, str]:
    """What is read from the packages themselves, their metadata, and a script."""
    return {
        METRICS: metrics_reference(root),
        DEPENDENCIES: dependencies_page(root),
        ARGO_PATCH: argo_patch((root / ARGO_SCRIPT).read_text()),
    }


def chart_files(root: Path) -> dict[Path, str]:
    """From the chart as it is, whose definitions must be fresh. Raises ValueError: a value that is
    not described, or no helm."""
    binaries = find_binaries()
    if binaries is None:
        raise ValueError("there is no helm: run `make setup`, which builds it")
    values = (root / CHART / "values.yaml").read_text()
    schema = (root / CHART / "values.schema.json").read_text()
    return {
        CHART_README: chart_readme(values, schema),
        INSTALL: install_manifest(root, binaries.helm),
    }


def differences(root: Path, wanted: Mapping[Path, str]) -> list[Path]:
    """Files that are missing, differ, or, in the folders of ``wanted`` that hold nothing else, have
    lost their source."""
    changed = [
        path
        for path, text in wanted.items()
        if not (root / path).is_file() or (root / path).read_text() != text
    ]
    present = {
        path.relative_to(root)
        for folder in (CHART_CRDS, PACKAGE_CRDS)
        if any(each.parent == folder for each in wanted)
        for path in (root / folder).glob("*")
    }
    return sorted([*changed, *(present - wanted.keys())])


def refresh(root: Path, wanted: Mapping[Path, str]) -> list[Path]:
    """Writes what is stale and removes what has lost its source."""
    stale = differences(root, wanted)
    for path in stale:
        if path in wanted:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(wanted[path])
        else:
            (root / path).unlink()
    return stale


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    options = parser.parse_args(arguments)
    if options.check:
        stale = differences(ROOT, wanted_files(ROOT) | reference_files(ROOT) | chart_files(ROOT))
        for path in stale:
            print(f"{path} is stale: run make generate", file=sys.stderr)
        return 1 if stale else 0
    # The chart holds what the first of them makes.
    for make in (wanted_files, reference_files, chart_files):
        for path in refresh(ROOT, make(ROOT)):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
