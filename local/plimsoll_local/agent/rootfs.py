"""The file system a container sees: this machine's, read-only, with the pod's volumes in it.

In: a :class:`~plimsoll_local.agent.container.ContainerSpec`, in a process that already has a mount
namespace of its own. Out: a new root. There are no image layers here: an "image" is this machine.
A mount point that this machine does not have (say ``/models`` or ``/dev/termination-log``) is made
by building its parent directories anew out of binds of their entries, so nothing on disk changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from plimsoll_local.agent.container import BindMount, ContainerSpec
from plimsoll_local.agent.linux import (
    Mount,
    bind,
    change_root,
    make_read_only,
    mount,
)

# Private to every container and empty at its start, as in the writable layer of an image.
SCRATCH_DIRECTORIES = ("/tmp", "/var/tmp", "/run")


def directories_to_rebuild(targets: Iterable[str]) -> set[str]:
    """The directories that must be made anew so that each of ``targets`` can be a mount point:
    every ancestor of a target this machine lacks or has as a link, and always the root itself."""
    rebuilt = {"/"}
    for target in targets:
        if os.path.exists(target) and not os.path.islink(target):
            continue
        parent = os.path.dirname(target)
        while parent != "/":
            rebuilt.add(parent)
            parent = os.path.dirname(parent)
    return rebuilt


def resolve_target(target: str) -> str:
    """The real place of a mount target: on most machines /var/run is a link to /run."""
    return os.path.join(
        os.path.realpath(os.path.dirname(target)), os.path.basename(target.rstrip("/"))
    )


def is_below(path: str, directories: Iterable[str]) -> bool:
    return any(path.startswith(directory.rstrip("/") + "/") for directory in directories)


def enter_root(spec: ContainerSpec) -> None:
    """Builds the root, moves into it and goes to the working directory.

    Raises OSError for a volume or working directory that cannot be shown.
    """
    mount("none", "/", flags=Mount.RECURSIVE | Mount.SLAVE)
    mount("container", spec.root, "tmpfs", Mount.NO_SUID | Mount.NO_DEV, "mode=755,size=1m")
    # Not to be copied into itself when the directory that holds it is bound.
    mount("none", spec.root, flags=Mount.UNBINDABLE)

    volumes = sorted(
        (BindMount(m.source, resolve_target(m.target), m.read_only) for m in spec.mounts),
        key=lambda m: m.target.count("/"),
    )
    own = {os.path.realpath(path) for path in SCRATCH_DIRECTORIES} | {"/proc"}
    own |= {volume.target for volume in volumes if os.path.isdir(volume.source)}
    outer = {volume.target for volume in volumes if not is_below(volume.target, own)}
    _rebuild("/", spec.root, directories_to_rebuild(outer), own, outer - own)
    make_read_only(spec.root)

    mount("proc", spec.root + "/proc", "proc", Mount.NO_SUID | Mount.NO_DEV | Mount.NO_EXEC)
    for path in sorted(own - {"/proc"} - {volume.target for volume in volumes}):
        source = spec.scratch + path
        os.makedirs(source, exist_ok=True)
        # 1777: any user may write in /tmp.
        os.chmod(source, 0o1777)
        bind(source, spec.root + path)
    for path in spec.hidden:
        if os.path.isdir(spec.root + path):
            mount("hidden", spec.root + path, "tmpfs", Mount.READ_ONLY, "size=4k")
    for path in spec.writable:
        _bind_at(BindMount(path, path), spec.root)
    for volume in volumes:
        _bind_at(volume, spec.root)
    for path in spec.readable:
        # Seen already, unless the container's own scratch, or a volume there, lies over it.
        if is_below(path, SCRATCH_DIRECTORIES):
            _bind_at(BindMount(path, path, read_only=True), spec.root)

    change_root(spec.root)
    os.chdir(spec.working_directory)


def _rebuild(directory: str, root: str, rebuilt: set[str], own: set[str], files: set[str]) -> None:
    """Makes ``root/directory`` with binds of the entries of ``directory``, going down into those
    to be rebuilt and leaving the directories ``own`` and the ``files`` as empty mount points."""
    os.makedirs(root + directory.rstrip("/"), exist_ok=True)
    entries = list(os.scandir(directory)) if os.path.isdir(directory) else []
    for entry in entries:
        place = root + entry.path
        if entry.path in own:
            os.mkdir(place)
        elif entry.path in files:
            _touch(place)
        elif entry.is_symlink():
            os.symlink(os.readlink(entry.path), place)
        elif entry.path in rebuilt:
            _rebuild(entry.path, root, rebuilt, own, files)
        elif entry.is_dir():
            os.mkdir(place)
            bind(entry.path, place)
        else:
            _touch(place)
            bind(entry.path, place)
    wanted = {path for path in rebuilt | own | files if os.path.dirname(path) == directory != path}
    for path in wanted - {entry.path for entry in entries}:
        if path in files:
            _touch(root + path)
        else:
            _rebuild(path, root, rebuilt, own, files)


def _bind_at(volume: BindMount, root: str) -> None:
    place = root + volume.target
    if not os.path.exists(place):
        if os.path.isdir(volume.source):
            os.makedirs(place)
        else:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            _touch(place)
    bind(volume.source, place)
    if volume.read_only:
        make_read_only(place)


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
