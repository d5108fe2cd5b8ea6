"""The node's bridge and one network namespace per pod.

In: a pod's uid. Out: a file that names its network namespace and the pod's address on the bridge.
Runs inside the cluster's own user and network namespace (namespace.py), where it is root. Knows
nothing of containers.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pyroute2 import IPRoute

from plimsoll_local.layout import NODE_ADDRESS

BRIDGE = "pbr0"
POD_CIDR = ipaddress.IPv4Network("10.244.0.0/16")

_CLONE_NEWNET = 0x40000000
_MS_BIND = 4096
_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class PodNetns:
    path: Path
    ip: str


class AddressesExhausted(Exception):
    """No free pod address is left in POD_CIDR."""


def create_bridge() -> None:
    """Brings up loopback and the bridge in this network namespace."""
    with IPRoute() as routes:
        loopback = routes.link_lookup(ifname="lo")[0]
        routes.link("set", index=loopback, state="up")
        routes.link("add", ifname=BRIDGE, kind="bridge")
        bridge = routes.link_lookup(ifname=BRIDGE)[0]
        routes.addr("add", index=bridge, address=NODE_ADDRESS, prefixlen=POD_CIDR.prefixlen)
        routes.link("set", index=bridge, state="up")


def add_local_address(address: str) -> None:
    """Makes a ClusterIP one of this namespace's own addresses, so that a proxy can listen on it."""
    with IPRoute() as routes:
        loopback = routes.link_lookup(ifname="lo")[0]
        routes.addr("replace", index=loopback, address=address, prefixlen=32)


def remove_local_address(address: str) -> None:
    with IPRoute() as routes:
        loopback = routes.link_lookup(ifname="lo")[0]
        routes.addr("del", index=loopback, address=address, prefixlen=32)


class PodNetwork:
    """Hands out pod namespaces; ``folder`` (on a file system of this mount namespace) holds the
    files that name them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._pods: dict[str, PodNetns] = {}
        # The next address to try: an address is not used again at once, as with a real CNI.
        self._next = int(POD_CIDR.network_address) + 2

    def create(self, pod_uid: str) -> PodNetns:
        """Idempotent for one pod. Raises AddressesExhausted or OSError."""
        with self._lock:
            known = self._pods.get(pod_uid)
            if known is not None:
                return known
            pod = PodNetns(self._folder / pod_uid, self._allocate())
            try:
                _connect(pod)
            except BaseException:
                _discard(pod)
                raise
            self._pods[pod_uid] = pod
            return pod

    def delete(self, pod_uid: str) -> None:
        """Idempotent. The interfaces go when the last process of the namespace has ended."""
        with self._lock:
            pod = self._pods.pop(pod_uid, None)
            if pod is None:
                return
            _discard(pod)

    def _allocate(self) -> str:
        used = {pod.ip for pod in self._pods.values()}
        for _ in range(POD_CIDR.num_addresses):
            address = str(ipaddress.IPv4Address(self._next))
            self._next += 1
            if self._next >= int(POD_CIDR.broadcast_address):
                self._next = int(POD_CIDR.network_address) + 2
            if address not in used:
                return address
        raise AddressesExhausted(f"all {len(used)} addresses of {POD_CIDR} are in use")


def _connect(pod: PodNetns) -> None:
    _in_thread(lambda: _create_namespace(pod.path))
    descriptor = os.open(pod.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Names of interfaces have at most 15 characters; the whole address is told apart by 8.
        _plug(descriptor, host_interface=f"v{int(ipaddress.IPv4Address(pod.ip)):08x}")
        _in_thread(lambda: _configure(descriptor, pod.ip))
    finally:
        os.close(descriptor)


def _discard(pod: PodNetns) -> None:
    _libc.umount2(os.fsencode(pod.path), _MNT_DETACH)
    pod.path.unlink(missing_ok=True)


def _create_namespace(path: Path) -> None:
    path.touch()
    if _libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET)")
    own = f"/proc/self/task/{threading.get_native_id()}/ns/net"
    if _libc.mount(own.encode(), os.fsencode(path), None, _MS_BIND, None) != 0:
        raise OSError(ctypes.get_errno(), "cannot keep a network namespace at", str(path))


def _plug(namespace: int, host_interface: str) -> None:
    with IPRoute() as routes:
        bridge = routes.link_lookup(ifname=BRIDGE)[0]
        routes.link(
            "add",
            ifname=host_interface,
            kind="veth",
            peer={"ifname": "eth0", "net_ns_fd": namespace},
        )
        interface = routes.link_lookup(ifname=host_interface)[0]
        routes.link("set", index=interface, master=bridge, state="up")


def _configure(namespace: int, address: str) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns(CLONE_NEWNET)")
    with IPRoute() as routes:
        loopback = routes.link_lookup(ifname="lo")[0]
        routes.link("set", index=loopback, state="up")
        interface = routes.link_lookup(ifname="eth0")[0]
        routes.addr("add", index=interface, address=address, prefixlen=POD_CIDR.prefixlen)
        routes.link("set", index=interface, state="up")
        routes.route("add", dst="default", gateway=NODE_ADDRESS)


def _in_thread(work: Callable[[], None]) -> None:
    """A network namespace belongs to a thread: one that ends afterwards changes nothing else."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
