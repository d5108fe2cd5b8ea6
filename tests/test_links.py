"""Links of the documentation lead somewhere, and one that does not is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.scripts import load_script

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tools" / "check_links.py"


@pytest.fixture(scope="module")
def links() -> ModuleType:
    return load_script(SCRIPT)


def test_every_link_of_the_repository_leads_somewhere() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("link", "complaint"),
    [
        ("other.md", None),
        ("other.md#two-words", None),
        ("other.md#code-and-a-link", None),
        ("other.md#twice-1", None),
        ("other.md#named", None),
        ("#here", None),
        ("sub/", None),
        ("sub/a%20space.txt", None),
        ("https://example.org/nothing", None),
        ("mailto:a@example.org", None),
        ("gone.md", "no such file"),
        ("other.md#twice-2", "no such heading"),
        ("other.md#in-code", "no such heading"),
        ("#there", "no such heading"),
        ("../../elsewhere.md", "outside the repository"),
    ],
)
@pytest.mark.parametrize("form", ["[words]({})", "![a picture]({})", "| a |\n|---|\n| [b]({}) |"])
def test_a_link_that_leads_nowhere_is_named(
    links: ModuleType, tmp_path: Path, link: str, complaint: str | None, form: str
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a space.txt").touch()
    (tmp_path / "other.md").write_text(
        "# Two words\n\n## `Code`, and a [link](#two-words)!\n\n## Twice\n\n## Twice\n\n"
        '<a name="named"></a>\n\n```\n# In code\n```\n'
    )
    (tmp_path / "page.md").write_text(f"# Here\n\n{form.format(link)}\n")
    found = list(links.broken_links(tmp_path, [Path("page.md"), Path("other.md")]))
    if complaint is None:
        assert found == []
    else:
        assert len(found) == 1
        assert found[0].startswith(f"page.md: {link}: {complaint}")


def test_links_in_code_are_not_links(links: ModuleType) -> None:
    assert links.read_page("`[a](gone.md)`\n\n    [b](gone.md)\n").links == ()
