"""One user, mount, network, pid, IPC and UTS namespace for a whole cluster, without root.

In: a function. Out: its exit status; the function runs as pid 1 of the new namespaces, as root
there, with a /proc of its own. When the calling process dies, pid 1 dies, and with pid 1 the kernel
ends every process of the namespace. Knows nothing of Kubernetes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
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
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)

# Switch, the value that refuses, and how to allow.
_SWITCHES = (
    ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=10000"),
    ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)


class NamespacesUnavailable(Exception):
    """This machine does not let us make namespaces; the message says what to do."""


def run_isolated(main: Callable[[], int]) -> int:
    """Runs ``main`` as pid 1 of new namespaces and waits for it; returns its exit status.

    To be called in a single-threaded process that does nothing else afterwards: it stays in the
    new namespaces itself (all but the pid namespace). SIGTERM and SIGINT are passed on to pid 1.
    Raises NamespacesUnavailable; a failure of ``main`` is printed and has status 1.
    """
    parent = os.getppid()
    _unshare()
    # The kernel drops the wish for a parent-death signal with a change of the user namespace.
    die_with_parent(parent)
    alive, end_of_parent = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end_of_parent)
        status = 1
        try:
            _die_with_outer_parent(alive)
            _make_private()
            status = main()
        except BaseException:  # noqa: BLE001 - this stack is another process's
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(alive)

    def pass_on(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, pass_on)
    _, status = os.waitpid(child, 0)
    os.close(end_of_parent)
    return os.waitstatus_to_exitcode(status)


def check_available() -> None:
    """Tries it all in a child. Raises NamespacesUnavailable, with what to do."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        # A failure is reported by the caller, once.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            run_isolated(lambda: os.write(writer, b"ok"))
        except NamespacesUnavailable as unavailable:
            os.write(writer, str(unavailable).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        answer = stream.read().decode()
    os.waitpid(child, 0)
    if answer != "ok":
        raise NamespacesUnavailable(answer or explain("/proc cannot be mounted in a namespace"))


def explain(cause: str, sysctls: Path = Path("/proc/sys")) -> str:
    """What is refused and what to do, with the switch that refuses where one is found."""
    refusing = [
        remedy
        for name, value, remedy in _SWITCHES
        if (sysctls / name).exists() and (sysctls / name).read_text().strip() == value
    ]
    allow = " and ".join(f"`sudo {remedy}`" for remedy in refusing)
    if not allow:
        allow = "allowing user namespaces (in a container: its seccomp profile, or --privileged)"
    return (
        "the local cluster lives in Linux namespaces, and this machine refuses them to this user "
        f"({cause}). What helps: {allow}; or running this as root with sudo; or a cluster that "
        "exists (kind, minikube), where the same chart and manifests install"
    )


def _unshare() -> None:
    uid, gid = os.getuid(), os.getgid()
    if _libc.unshare(_CLONE_NEWUSER | _ALL_BUT_USER) == 0:
        try:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
            Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        except OSError as error:
            raise NamespacesUnavailable(explain(str(error))) from error
        return
    cause = os.strerror(ctypes.get_errno())
    # Root needs no user namespace of its own.
    if uid != 0 or _libc.unshare(_ALL_BUT_USER) != 0:
        raise NamespacesUnavailable(explain(f"unshare: {cause}"))


def _die_with_outer_parent(alive: int) -> None:
    """os.getppid() is 0 across a pid namespace, so a pipe tells whether the parent had died before
    the signal was asked for: its end hangs up then."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    poller = select.poll()
    poller.register(alive, 0)
    if poller.poll(0):
        os._exit(1)
    os.close(alive)


def _make_private() -> None:
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    socket.sethostname("plimsoll-local")


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    result = _libc.mount(
        None if source is None else source.encode(),
        target.encode(),
        None if kind is None else kind.encode(),
        ctypes.c_ulong(flags),
        None,
    )
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {kind or 'propagation'}: {os.strerror(number)}", target)
