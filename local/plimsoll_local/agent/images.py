"""What stands in for container images: a table of image name to a way of starting a program here.

In: a JSON file {"name:tag": {"entrypoint": [...], "command": [...], "env": {...},
"workingDirectory": "/", "writable": ["/path"], "readable": ["/path"]}}; only what differs from nothing need be there.
Out: an :class:`Image`, or None for a name that is not in the table. Nothing is ever downloaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


class ImageTableError(ValueError):
    """The table cannot be used as it is; names the file or the image, and what is allowed."""


@dataclass(frozen=True)
class Image:
    """``entrypoint`` and ``command`` as in a Dockerfile; ``writable`` are directories of this
    machine that the container may write to, where all others are read-only."""

    digest: str
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    working_directory: str = "/"
    writable: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()

    def argv(
        self, command: Sequence[str] | None, arguments: Sequence[str] | None
    ) -> tuple[str, ...]:
        """The program for a container's ``command`` and ``args``: a command replaces entrypoint and
        command of the image, arguments alone replace its command."""
        if command:
            return (*command, *(arguments or ()))
        return (*self.entrypoint, *(arguments or self.command))


class ImageTable:
    """Reads the file again at every look, so a line added later is found by the next pull."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def find(self, reference: str) -> Image | None:
        """The image, with the usual short forms: ``docker.io/library/x``, ``x`` for ``x:latest``.

        Raises ImageTableError when the table itself is unreadable, naming the file.
        """
        for name in _names(reference):
            entry = self._read().get(name)
            if entry is not None:
                return _build(name, entry)
        return None

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._read()))

    def _read(self) -> dict[str, dict[str, object]]:
        try:
            table = json.loads(self._path.read_text())
        except (OSError, ValueError) as error:
            raise ImageTableError(f"image table {self._path}: {error}") from error
        if not isinstance(table, dict):
            raise ImageTableError(f"image table {self._path}: must be an object of image names")
        return table


def _names(reference: str) -> tuple[str, ...]:
    short = reference.removeprefix("docker.io/").removeprefix("library/")
    tagged = short if ":" in short.rpartition("/")[2] or "@" in short else f"{short}:latest"
    return reference, short, tagged


def _build(name: str, entry: dict[str, object]) -> Image:
    allowed = {"entrypoint", "command", "env", "workingDirectory", "writable", "readable"}
    unknown = sorted(set(entry) - allowed)
    if unknown:
        raise ImageTableError(
            f"image {name}: unknown field {unknown[0]}; allowed: {sorted(allowed)}"
        )
    env = entry.get("env", {})
    if not isinstance(env, dict):
        raise ImageTableError(f"image {name}: env must be an object")
    digest = hashlib.sha256(json.dumps([name, entry], sort_keys=True).encode()).hexdigest()
    return Image(
        digest=f"sha256:{digest}",
        entrypoint=_texts(entry, "entrypoint"),
        command=_texts(entry, "command"),
        env={str(key): str(value) for key, value in env.items()},
        working_directory=str(entry.get("workingDirectory", "/")),
        writable=_texts(entry, "writable"),
        readable=_texts(entry, "readable"),
    )


def _texts(entry: dict[str, object], field_name: str) -> tuple[str, ...]:
    values = entry.get(field_name, [])
    if not isinstance(values, list):
        raise ImageTableError(f"image field {field_name} must be a list of strings")
    return tuple(str(value) for value in values)
