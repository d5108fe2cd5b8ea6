"""Which flags a version of vLLM knows. In: a version, or None where nobody has told it. Out: flags.

Only what changed between versions is here; every other flag is the same from 0.8.0 to 0.32.0. An
unknown version gets what all of them know.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Version = tuple[int, int, int]

_VERSION = re.compile(r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?![\d])")


@dataclass(frozen=True)
class _Row:
    """``flag`` is known in ``since`` <= version < ``until``; None: no bound."""

    flag: str
    since: Version | None
    until: Version | None


# Prompts do not belong into a log: up to 0.10.0 each request was logged unless this was said
# (github.com/vllm-project/vllm/pull/21739); 0.12.0 refuses the flag (pull/29402).
QUIET = _Row("--disable-log-requests", None, (0, 10, 1))
# The largest length that fits (pull/29431, first in 0.14.0); before, the model's own is the default.
FITTING_LENGTH = _Row("--max-model-len=auto", (0, 14, 0), None)
# Ranks in several pods without Ray: the flags of 0.12.0 and later; --headless alone is older.
SEVERAL_NODES_SINCE: Version = (0, 12, 0)


def flags_for(version: Version | None, *rows: _Row) -> list[str]:
    return [row.flag for row in rows if version is not None and _knows(version, row)]


def _knows(version: Version, row: _Row) -> bool:
    if row.since is not None and version < row.since:
        return False
    return row.until is None or version < row.until


def read_version(image: str | None, said: str | None) -> Version | None:
    """``said`` wins (spec.runtime.version); else the image's tag, such as v0.11.0 or 0.11.0-cpu.
    None for ``latest``, a digest, or any other tag."""
    text = said
    if text is None:
        _, _, text = (image or "").partition("@")[0].rpartition("/")[2].partition(":")
    found = _VERSION.match(text)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3] or 0))
