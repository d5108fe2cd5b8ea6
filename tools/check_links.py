"""Checks the links of every Markdown page: each relative target exists, each anchor has a heading.

In: the Markdown files that git tracks. Out: a line for each link that leads nowhere, and exit
status 1 if there is one. External links are not fetched: a page must not fail because another site
does. Knows Markdown by markdown-it-py, and the anchors of headings as GitHub makes them.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent
_MARKDOWN = MarkdownIt("commonmark").enable("table")
_HTML_ANCHOR = re.compile(r"<a\s[^>]*?(?:id|name)=[\"']([^\"']+)[\"']")


@dataclass(frozen=True)
class Page:
    links: tuple[str, ...]
    anchors: frozenset[str]


def read_page(text: str) -> Page:
    """What the page links to, and what may be linked in it. Code is not looked at."""
    tokens = list(_flatten(_MARKDOWN.parse(text)))
    targets = [
        str(token.attrs["href" if token.type == "link_open" else "src"])
        for token in tokens
        if token.type in ("link_open", "image")
    ]
    html = "".join(token.content for token in tokens if token.type.startswith("html_"))
    anchors = {*_heading_anchors(tokens), *_HTML_ANCHOR.findall(html)}
    return Page(tuple(targets), frozenset(anchors))


def broken_links(root: Path, pages: list[Path]) -> Iterator[str]:
    """A message for each link of ``pages`` (paths from ``root``) that leads nowhere."""
    read = {(root / path).resolve(): read_page((root / path).read_text()) for path in pages}
    for path in pages:
        here = (root / path).resolve()
        for link in read[here].links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (here.parent / unquote(parts.path)).resolve() if parts.path else here
            if not target.is_relative_to(root.resolve()):
                yield f"{path}: {link}: outside the repository"
            elif not target.exists():
                yield f"{path}: {link}: no such file"
            elif parts.fragment and target in read and parts.fragment not in read[target].anchors:
                near = ", ".join(sorted(read[target].anchors)) or "none"
                yield f"{path}: {link}: no such heading; there are: {near}"


def _flatten(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from _flatten(token.children or [])


def _heading_anchors(tokens: list[Token]) -> Iterator[str]:
    seen: Counter[str] = Counter()
    for opening, inline in itertools.pairwise(tokens):
        if opening.type != "heading_open":
            continue
        shown = "".join(
            token.content
            for token in inline.children or []
            if token.type in ("text", "code_inline")
        )
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        yield f"{slug}-{seen[slug]}" if seen[slug] else slug
        seen[slug] += 1


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    pages = [Path(name) for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]
    broken = list(broken_links(ROOT, pages))
    for message in broken:
        print(message, file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
