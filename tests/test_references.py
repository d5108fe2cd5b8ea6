"""The references of metrics and dependencies say all there is, and refuse what nobody explained."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from support.engine_server import api_server
from support.scripts import load_script

ROOT = Path(__file__).parent.parent
OF_THE_PROCESS = ("process_", "python_")


@pytest.fixture(scope="module")
def dependencies() -> ModuleType:
    return load_script(ROOT / "tools" / "dependencies.py")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what the page of dependencies is made from, to be spoilt."""
    (tmp_path / "tools").mkdir()
    for path in ("pyproject.toml", "uv.lock", "tools/dependencies.yaml"):
        (tmp_path / path).write_bytes((ROOT / path).read_bytes())
    return tmp_path


def test_every_metric_of_a_running_engine_is_in_the_reference() -> None:
    reference = (ROOT / "docs" / "metrics.md").read_text()
    with api_server() as engine:
        page = engine.client.get("/metrics").text
    names = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in text_string_to_metric_families(page)
        if not family.name.startswith(OF_THE_PROCESS) and not family.name.endswith("_created")
    }
    assert len(names) > 40
    assert [name for name in sorted(names) if f"| `{name}` |" not in reference] == []


def spoil(project: Path, table: str, name: str, text: str | None) -> None:
    file = project / "tools" / "dependencies.yaml"
    content = yaml.safe_load(file.read_text())
    if text is None:
        del content[table][name]
    else:
        content[table][name] = text
    file.write_text(yaml.safe_dump(content))


@pytest.mark.parametrize(
    ("table", "name", "text", "complaint"),
    [
        ("reasons", "torch", None, "reasons differ from pyproject.toml: {'torch'}"),
        ("reasons", "leftpad", "none", "reasons differ from pyproject.toml: {'leftpad'}"),
        ("licences", "gguf", None, "the licence of gguf is not in its metadata"),
    ],
)
def test_what_nobody_explained_is_named(
    dependencies: ModuleType,
    project: Path,
    table: str,
    name: str,
    text: str | None,
    complaint: str,
) -> None:
    spoil(project, table, name, text)
    with pytest.raises(ValueError, match=complaint):
        dependencies.dependencies_page(project)


def test_a_package_is_listed_with_the_extras_that_lead_to_it(dependencies: ModuleType) -> None:
    packages = [
        {"name": "plimsoll", "optional-dependencies": {"a": [{"name": "x", "extra": ["fast"]}]}},
        {
            "name": "x",
            "dependencies": [{"name": "y"}],
            "optional-dependencies": {"fast": [{"name": "z"}], "slow": [{"name": "w"}]},
        },
        {"name": "y"},
        {"name": "z"},
        {"name": "w"},
    ]
    assert dependencies.brought(packages) == {"x": {"a"}, "y": {"a"}, "z": {"a"}}
