"""The generated files are those that their sources make."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from support.scripts import load_script

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tools" / "generate.py"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return load_script(SCRIPT)


def test_nothing_is_stale() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_stale_is_named(generate: ModuleType, tmp_path: Path) -> None:
    chart = tmp_path / "charts/plimsoll/files/crds"
    chart.mkdir(parents=True)
    (chart / "same.yaml").write_text("a")
    (chart / "other.yaml").write_text("a")
    (chart / "orphan.yaml").write_text("a")
    folder = Path("charts/plimsoll/files/crds")
    wanted = {folder / "same.yaml": "a", folder / "other.yaml": "b", folder / "new.yaml": "c"}
    stale = generate.differences(tmp_path, wanted)
    assert [path.name for path in stale] == ["new.yaml", "orphan.yaml", "other.yaml"]


def test_a_definition_of_another_form_is_refused(generate: ModuleType) -> None:
    with pytest.raises(ValueError, match="expected `name: a"):
        generate.chart_crd(Path("crds/a.yaml"), "metadata:\n  name: b\n")
    with pytest.raises(ValueError, match="template braces"):
        generate.chart_crd(Path("crds/a.yaml"), "metadata:\n  name: a\ndescription: '{{'\n")


def test_the_reference_has_every_field_with_what_it_allows(generate: ModuleType) -> None:
    schema = {
        "description": "A thing.",
        "properties": {
            "kind": {"type": "string"},
            "spec": {
                "type": "object",
                "x-kubernetes-validations": [
                    {"rule": "self.a <= 3", "message": "a is at most b"},
                    {"rule": "self.m.matches('^[a](|[b])$')"},
                ],
                "properties": {
                    "a": {
                        "type": "integer",
                        "minimum": 1,
                        "default": 2,
                        "description": "One\n| two.",
                    },
                    "m": {"type": "string", "enum": ["Off", "Auto"]},
                    "l": {
                        "type": "array",
                        "maxItems": 4,
                        "items": {"type": "object", "properties": {"x": {"type": "number"}}},
                    },
                },
            },
        },
    }
    definition = {
        "spec": {
            "group": "g.dev",
            "scope": "Namespaced",
            "names": {"kind": "Thing"},
            "versions": [{"name": "v1", "schema": {"openAPIV3Schema": schema}}],
        }
    }
    lines = generate.api_reference([definition]).splitlines()
    assert "## Thing, g.dev/v1" in lines
    assert "| `spec.a` | integer | `2` | >= 1 | One \\| two. |" in lines
    assert "| `spec.m` | string |  | `Off`, `Auto` |  |" in lines
    assert "| `spec.l` | list of object |  | at most 4 items |  |" in lines
    assert "| `spec.l[].x` | number |  |  |  |" in lines
    assert "| `spec` | a is at most b |" in lines
    # Without a message the rule itself, as code: Markdown would take it for a link.
    assert "| `spec` | `self.m.matches('^[a](\\|[b])$')` |" in lines
    assert not any("`kind`" in line for line in lines)


class TestChart:
    """``generate`` puts tools/ on the path, so that its neighbour can be imported."""

    @pytest.fixture
    def chart(self, generate: ModuleType) -> ModuleType:
        return importlib.import_module("chart_reference")

    VALUES = "# How many.\nreplicas: 1\nimage:\n  # Which,\n  # of the registry's.\n  tag: latest\n"

    def test_every_leaf_has_its_comment_and_default(self, chart: ModuleType) -> None:
        found = [(v.path, v.default, v.meaning) for v in chart.read_values(self.VALUES)]
        assert found == [
            ("replicas", 1, "How many."),
            ("image.tag", "latest", "Which, of the registry's."),
        ]

    def test_a_value_without_its_own_comment_is_refused_by_name(self, chart: ModuleType) -> None:
        with pytest.raises(ValueError, match=r"image\.name has no comment"):
            list(chart.read_values(f"{self.VALUES}  name: x\n"))

    def test_a_value_without_a_place_in_the_schema_is_refused(self, chart: ModuleType) -> None:
        integer = {"type": "integer", "minimum": 0}
        schema: dict[str, Any] = {"properties": {"replicas": integer, "image": {}}}
        with pytest.raises(ValueError, match=r"no place for image\.tag"):
            chart.chart_readme(self.VALUES, json.dumps(schema))
        schema["properties"]["image"] = {"properties": {"tag": {"enum": ["latest", True]}}}
        text = chart.chart_readme(self.VALUES, json.dumps(schema))
        assert "| `replicas` | `1` | integer, >= 0 | How many. |" in text
        assert "| `image.tag` |" in text


DEFINITIONS = sorted((ROOT / "crds").glob("*.yaml"))


def _fields(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}", field
        yield from _fields(field, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(inner := schema.get(key), dict):
            yield from _fields(inner, f"{path}[]")


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda path: path.stem)
def test_kubectl_explain_says_something_of_every_field(definition: Path) -> None:
    body = yaml.safe_load(definition.read_text())
    (version,) = body["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    assert schema["description"]
    silent = [path for path, field in _fields(schema) if not field.get("description")]
    # Kubernetes' own.
    assert silent == [".metadata"]
    assert version["additionalPrinterColumns"][-1]["name"] == "Age"
    assert "plimsoll" in body["spec"]["names"]["categories"]
