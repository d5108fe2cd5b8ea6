"""One user, mount, network, pid, IPC and UTS namespace for a whole cluster, without root.

In: a function. Out: its exit status; the function runs as pid 1 of the new namespaces, as root
there, with a /proc of its own. When the calling process dies, pid 1 dies, and with pid 1 the kernel
ends every process of the namespace. Knows nothing of Kubernetes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

from plimsoll_local.processes import die_with_parent

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000
_ALL_BUT_USER = _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
_MS_REC, _MS_PRIVATE = 16384, 1 << 18
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8

_libc = ctypes.CDLL(None, use_errno=True)


class NamespacesUnavailable(Exception):
    """This machine does not let us make namespaces; the message says what to do."""


_HELP = (
    "The local cluster needs Linux namespaces, which this machine refuses to this user ({cause}). "
    "Either allow unprivileged user namespaces (sysctl user.max_user_namespaces above 0, "
    "kernel.unprivileged_userns_clone=1, and on Ubuntu 24.04 "
    "kernel.apparmor_restrict_unprivileged_userns=0), or run this as root, or use a cluster that "
    "exists (kind, minikube): the same chart and manifests install there."
)


def run_isolated(main: Callable[[], int]) -> int:
    """Runs ``main`` as pid 1 of new namespaces and waits for it; returns its exit status.

    To be called in a single-threaded process that does nothing else afterwards: it stays in the
    new user namespace itself. SIGTERM to the caller is passed on to pid 1.
    Raises NamespacesUnavailable.
    """
    _unshare()
    supervisor = os.getpid()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            # os.getppid() is 0 across a pid namespace, so only the signal itself is asked for.
            _libc.prctl(1, signal.SIGKILL, 0, 0, 0)
            _mount_own_proc()
            status = main()
        except BaseException:  # noqa: BLE001 - pid 1 may not return into the caller's stack
            traceback.print_exc()
        finally:
            os._exit(status)
    die_with_parent_kept(supervisor)

    def pass_on(number: int, _frame: object) -> None:
        os.kill(child, number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, pass_on)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def die_with_parent_kept(own_pid: int) -> None:
    """Asks again for the parent-death signal: the kernel drops it when a process changes its
    user namespace."""
    assert own_pid == os.getpid()
    die_with_parent(os.getppid())


def check_available() -> None:
    """Tries it in a child. Raises NamespacesUnavailable, with what to do."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            status = run_isolated(lambda: 0)
            message = b"" if status == 0 else b"/proc cannot be mounted"
        except NamespacesUnavailable as unavailable:
            message = str(unavailable).encode()
        os.write(writer, message)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        text = stream.read().decode()
    os.waitpid(child, 0)
    if text:
        raise NamespacesUnavailable(text if "namespaces" in text else _HELP.format(cause=text))


def _unshare() -> None:
    uid, gid = os.getuid(), os.getgid()
    if _libc.unshare(_CLONE_NEWUSER | _ALL_BUT_USER) == 0:
        try:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
            Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        except OSError as error:
            raise NamespacesUnavailable(_HELP.format(cause=str(error))) from error
        return
    cause = os.strerror(ctypes.get_errno())
    # Root needs no user namespace of its own.
    if uid != 0 or _libc.unshare(_ALL_BUT_USER) != 0:
        raise NamespacesUnavailable(_HELP.format(cause=cause))


def _mount_own_proc() -> None:
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    if (
        _libc.mount(
            None if source is None else source.encode(),
            target.encode(),
            None if kind is None else kind.encode(),
            ctypes.c_ulong(flags),
            None,
        )
        != 0
    ):
        raise OSError(ctypes.get_errno(), "mount", target)
