"""A directory of small files that changes all at once, as the kubelet writes mounted content.

In: a directory and the files it is to hold. Out: the directory. The files are links through
``..data``, which is a link to a directory of one generation; a rename of that one link shows the
next generation, so a reader sees all files old or all files new. Knows nothing of where they come from.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_CURRENT = "..data"


@dataclass(frozen=True)
class File:
    content: bytes
    mode: int


def write_files(directory: Path, files: Mapping[str, File]) -> bool:
    """Makes ``directory`` hold exactly ``files`` (relative path to file); returns whether anything
    changed. Raises ValueError for a path that leaves the directory."""
    for path in files:
        if path.startswith(("/", "..")) or ".." in Path(path).parts or not Path(path).parts:
            raise ValueError(f"invalid path {path!r}: must be relative and without '..'")
    directory.mkdir(parents=True, exist_ok=True)
    current = directory / _CURRENT
    if current.is_symlink() and _read_files(current.resolve()) == dict(files):
        return False

    generation = Path(tempfile.mkdtemp(prefix="..", dir=directory))
    generation.chmod(0o755)
    for path, file in files.items():
        place = generation / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.content)
        place.chmod(file.mode)
    previous = current.resolve() if current.is_symlink() else None
    fresh = directory / "..data_tmp"
    fresh.symlink_to(generation.name)
    fresh.rename(current)

    tops = {Path(path).parts[0] for path in files}
    for top in tops:
        link = directory / top
        if not link.is_symlink():
            link.symlink_to(Path(_CURRENT) / top)
    for entry in os.scandir(directory):
        if not entry.name.startswith("..") and entry.name not in tops:
            os.unlink(entry.path)
    if previous is not None:
        shutil.rmtree(previous)
    return True


def _read_files(directory: Path) -> dict[str, File]:
    return {
        str(path.relative_to(directory)): File(path.read_bytes(), path.stat().st_mode & 0o7777)
        for path in directory.rglob("*")
        if path.is_file()
    }
