"""The few Linux calls that isolate a container and that Python 3.11 does not offer.

In: paths, file descriptors and flags. Out: nothing, or an ``OSError`` that names the call and the
path. Standard library only: every container's shim imports this before it may import anything else.
This module knows nothing of pods.
"""

from __future__ import annotations

import ctypes
import os
from enum import IntFlag

_libc = ctypes.CDLL(None, use_errno=True)

# The same numbers on x86-64 and arm64 (asm-generic): mount_setattr came after the tables were joined.
_SYS_MOUNT_SETATTR = 442
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_KCMP = {"x86_64": 312, "aarch64": 272}
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR_RDONLY = 0x1
_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1
_KCMP_VM = 1


class Namespace(IntFlag):
    MOUNT = 0x00020000
    UTS = 0x04000000
    IPC = 0x08000000
    PID = 0x20000000
    NETWORK = 0x40000000


class Mount(IntFlag):
    NONE = 0
    READ_ONLY = 1
    NO_SUID = 2
    NO_DEV = 4
    NO_EXEC = 8
    BIND = 4096
    RECURSIVE = 16384
    PRIVATE = 1 << 18
    UNBINDABLE = 1 << 17
    SLAVE = 1 << 19


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def _check(result: int, call: str, path: str | None = None) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}", path)
    return result


def _encode(text: str | None) -> bytes | None:
    return None if text is None else os.fsencode(text)


def unshare(namespaces: Namespace) -> None:
    """New namespaces for this process; a new pid namespace holds only its later children."""
    _check(_libc.unshare(int(namespaces)), f"unshare({namespaces!r})")


def enter(descriptor: int, namespaces: Namespace) -> None:
    """Joins the namespace behind a /proc/PID/ns file or, for several at once, behind a pidfd."""
    _check(_libc.setns(descriptor, int(namespaces)), f"setns({namespaces!r})")


def mount(
    source: str, target: str, kind: str | None = None, flags: Mount = Mount.NONE, data: str = ""
) -> None:
    """mount(2); ``kind`` is the file system type and ``data`` its options."""
    result = _libc.mount(
        _encode(source), _encode(target), _encode(kind), ctypes.c_ulong(flags), _encode(data)
    )
    _check(result, f"mount {source} on", target)


def bind(source: str, target: str) -> None:
    """Shows ``source`` with every mount below it at ``target`` as well.

    Always recursive: a user namespace may not uncover what a mount below hides.
    """
    mount(source, target, flags=Mount.BIND | Mount.RECURSIVE)


def unmount(target: str) -> None:
    """Takes the mount at ``target`` out of sight now; it ends when nothing uses it any more."""
    _check(_libc.umount2(_encode(target), _MNT_DETACH), "umount", target)


def make_read_only(target: str) -> None:
    """Read-only from ``target`` down, every mount below included; keeps all other mount flags."""
    attributes = _MountAttr(attr_set=_MOUNT_ATTR_RDONLY)
    result = _libc.syscall(
        _SYS_MOUNT_SETATTR,
        ctypes.c_long(_AT_FDCWD),
        _encode(target),
        _AT_RECURSIVE,
        ctypes.byref(attributes),
        ctypes.sizeof(attributes),
    )
    _check(result, "mount_setattr (Linux 5.12 or newer) on", target)


def change_root(new_root: str) -> None:
    """Makes ``new_root``, a mount point, the root of this mount namespace and forgets the old one."""
    os.chdir(new_root)
    # With both names the same the old root lies on top of the new one, and goes with one unmount.
    _check(_libc.syscall(_SYS_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root", new_root)
    unmount(".")
    os.chdir("/")


def set_death_signal(signal_number: int) -> None:
    """This process gets the signal when the thread that started it ends, however it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl")


def set_host_name(name: str) -> None:
    encoded = os.fsencode(name)
    _check(_libc.sethostname(encoded, len(encoded)), f"sethostname {name}")


def share_memory_space(first: int, second: int) -> bool:
    """Whether two processes have one address space, as parent and child of a vfork do."""
    number = _SYS_KCMP.get(os.uname().machine)
    if number is None:
        return False
    return bool(_libc.syscall(number, first, second, _KCMP_VM, 0, 0) == 0)
