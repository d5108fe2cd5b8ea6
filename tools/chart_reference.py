"""The README of the chart and the manifest for those without Helm: both made from the chart.

In: values.yaml, values.schema.json, and helm. Out: Markdown with a row for each value, and
manifests/install.yaml. Every value must have a comment and a place in the schema; what has not is
refused by name.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path("charts/plimsoll")
NAMESPACE = "plimsoll-system"

README_HEAD = """\
# The chart of Plimsoll

Generated from values.yaml and values.schema.json by tools/generate.py: edit those.

```
helm install plimsoll charts/plimsoll -n plimsoll-system --create-namespace
helm test plimsoll -n plimsoll-system
```

Unknown values and bad ones are refused by name before anything is changed. `helm upgrade` upgrades the
definitions too; `helm uninstall` leaves them, and with them every LLMDeployment
([operations](../../docs/operations.md#upgrade-and-uninstall)). Without Helm:
`kubectl apply --server-side -f manifests/install.yaml` is this chart with its defaults, rendered, without what needs
the Prometheus operator.

| value | default | allowed | meaning |
|---|---|---|---|
"""

INSTALL_HEAD = """\
# Generated from charts/plimsoll by tools/generate.py: the chart with its defaults, for those without
# Helm. What needs the Prometheus operator's kinds is left out. Server-side, because the definitions
# are larger than the annotation that a plain apply would keep:
#
#   kubectl apply --server-side -f manifests/install.yaml
apiVersion: v1
kind: Namespace
metadata:
  name: plimsoll-system
"""


@dataclass(frozen=True)
class Value:
    path: str
    default: Any
    meaning: str


def read_values(text: str) -> Iterator[Value]:
    """The leaves of values.yaml in their order, each with the comment right above it. Raises
    ValueError for one without: a comment of a parent does not count."""
    loaded = yaml.safe_load(text)
    parents: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        key = re.match(r"^( *)([A-Za-z]+):(.*)$", line)
        if stripped.startswith("#"):
            comment.append(stripped.lstrip("# "))
        elif key is None:
            comment = []
        else:
            indent, name, rest = len(key[1]), key[2], key[3].strip()
            parents = [parent for parent in parents if parent[0] < indent]
            path = ".".join([*(name for _, name in parents), name])
            if rest:
                if not comment:
                    raise ValueError(f"values.yaml: {path} has no comment right above it")
                yield Value(path, _find(loaded, path), " ".join(comment))
            else:
                parents.append((indent, name))
            comment = []


def chart_readme(values_text: str, schema_text: str) -> str:
    schema = json.loads(schema_text)
    rows = [
        f"| `{value.path}` | `{json.dumps(value.default)}` | {_allowed(_field(schema, value.path))} "
        f"| {value.meaning.replace('|', chr(92) + '|')} |"
        for value in read_values(values_text)
    ]
    return README_HEAD + "\n".join(rows) + "\n"


def install_manifest(root: Path, helm: Path) -> str:
    """Raises ValueError with helm's words."""
    done = subprocess.run(
        [helm, "template", "plimsoll", root / CHART, "--namespace", NAMESPACE, "--skip-tests"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ValueError(f"helm template: {done.stderr.strip()}")
    return INSTALL_HEAD + done.stdout


def _find(loaded: Mapping[str, Any], path: str) -> Any:
    found: Any = loaded
    for name in path.split("."):
        found = found[name]
    return found


def _field(schema: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    field: Mapping[str, Any] = schema
    for name in path.split("."):
        if name not in field.get("properties", {}):
            raise ValueError(f"values.schema.json has no place for {path}")
        field = field["properties"][name]
    return field


def _allowed(field: Mapping[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    kinds = field["type"] if isinstance(field["type"], list) else [field["type"]]
    words = " or ".join({"array": "list", "object": "map"}.get(kind, kind) for kind in kinds)
    bounds = (("exclusiveMinimum", ">"), ("minimum", ">="), ("maximum", "<="))
    return ", ".join([words, *(f"{sign} {field[key]}" for key, sign in bounds if key in field)])
