"""A real kubelet and containerd beside the control plane: what kills a container here is the kernel.

Only as root, in mount, network and pid namespaces of its own (`make e2e-kubelet`): everything that is
started ends with them, and what kubelet and containerd write at fixed paths lies in a tmpfs. Global
sysctls that kubelet sets, and the cgroups that it makes, are put back. Images come as archives.

``python -m support.real_kubelet`` builds the kubelet, which those namespaces have no network for.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from plimsoll_local import binaries
from plimsoll_local.controlplane import ControlPlane, Endpoint
from plimsoll_local.go_build import GoBuild
from plimsoll_local.processes import read_tail, start_child, stop_children

NODE, BRIDGE, ADDRESS = "real", "plimsoll0", "10.244.0.1"
# Written by kubelet and containerd wherever their own folders are.
FIXED_PATHS = ("/run", "/var/lib/kubelet", "/var/lib/cni", "/var/log")
SYSCTLS = (
    *("kernel/panic", "kernel/panic_on_oops", "vm/overcommit_memory"),
    *("kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"),
)
PAUSE = "localhost/plimsoll/pause:1"
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class RealCluster:
    kubeconfig: Path
    kubectl_path: Path
    socket: Path

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """stdout; raises CalledProcessError, with stderr, when it fails."""
        environment = os.environ | {"KUBECONFIG": str(self.kubeconfig)}
        done = subprocess.run(
            [self.kubectl_path, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
            check=False,
        )
        done.check_returncode()
        return done.stdout

    def ctr(self, *arguments: str | Path) -> str:
        done = subprocess.run(
            ["ctr", "--address", self.socket, "--namespace", "k8s.io", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextmanager
def real_cluster(folder: Path, archives: Sequence[Path]) -> Iterator[RealCluster]:
    """One node of that name, Ready, with the images of the archives."""
    programs = binaries.ensure_binaries()
    kubelet = ensure_kubelet()
    with ExitStack() as stack:
        prepare_namespaces()
        stack.enter_context(kept_sysctls())
        stack.callback(remove_cgroups)
        plane = ControlPlane(folder / "plane", programs, endpoint=Endpoint("0.0.0.0", ADDRESS))
        stack.enter_context(plane)
        children: list[subprocess.Popen[bytes]] = []
        stack.callback(stop_children, children)
        cluster = RealCluster(plane.kubeconfig, programs.kubectl, folder / "containerd.sock")
        (folder / "containerd.toml").write_text(containerd_configuration(folder))
        (folder / "cni").mkdir()
        (folder / "cni" / "10-bridge.conflist").write_text(CNI.replace("FOLDER", str(folder)))
        log = folder / "containerd.log"
        children.append(start_child(["containerd", "--config", folder / "containerd.toml"], log))
        until(lambda: bool(cluster.ctr("version")), 30, log)
        for archive in archives:
            cluster.ctr("images", "import", archive)
        stack.callback(remove_pods, cluster)
        (folder / "kubelet.yaml").write_text(yaml.safe_dump(kubelet_configuration(folder)))
        log = folder / "kubelet.log"
        children.append(
            start_child(
                [
                    *(kubelet, f"--config={folder / 'kubelet.yaml'}"),
                    *(f"--kubeconfig={plane.kubeconfig}", f"--hostname-override={NODE}"),
                    *(f"--node-ip={ADDRESS}", f"--root-dir={folder / 'kubelet'}"),
                    f"--cert-dir={folder / 'kubelet-pki'}",
                ],
                log,
            )
        )
        ready = ("wait", "--for=condition=Ready", f"node/{NODE}", "--timeout=1s")
        until(lambda: bool(cluster.kubectl(*ready)), 90, log)
        yield cluster


def ensure_kubelet() -> Path:
    """Of the control plane's release, built once from the same pinned module."""
    folder = binaries.cache_home() / "bin" / binaries.cache_key()
    if not (folder / "kubelet").exists():
        program = binaries.kubernetes_program("kubelet", 27)
        build = GoBuild(
            binaries.MODULES, binaries.cache_home(), lambda line: print(line, flush=True)
        )
        build.run([program], folder)
    return folder / "kubelet"


def prepare_namespaces() -> None:
    for path in FIXED_PATHS:
        Path(path).mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", path], check=True)
    for command in (
        ("link", "set", "lo", "up"),
        ("link", "add", BRIDGE, "type", "bridge"),
        ("address", "add", f"{ADDRESS}/24", "dev", BRIDGE),
        ("link", "set", BRIDGE, "up"),
        # Without one the API server finds no address to advertise.
        ("route", "add", "default", "dev", BRIDGE),
    ):
        subprocess.run(["ip", *command], check=True)


@contextmanager
def kept_sysctls() -> Iterator[None]:
    """They are of the machine, not of a namespace."""
    paths = [path for name in SYSCTLS if (path := Path("/proc/sys", name)).exists()]
    before = {path: path.read_text() for path in paths}
    try:
        yield
    finally:
        for path, value in before.items():
            path.write_text(value)


def remove_pods(cluster: RealCluster) -> None:
    """A container outlives containerd."""
    for task in cluster.ctr("tasks", "list", "--quiet").split():
        subprocess.run(
            ["ctr", "-a", cluster.socket, "-n", "k8s.io", "tasks", "delete", "--force", task],
            capture_output=True,
            check=False,
        )


def remove_cgroups() -> None:
    for top in CGROUPS.glob("*/kubepods"):
        for folder, _, _ in os.walk(top, topdown=False):
            try:
                os.rmdir(folder)
            except OSError as error:
                print(f"left: {folder}: {error.strerror}")


def until(holds: Callable[[], bool], within: float, log: Path) -> None:
    """Raises TimeoutError with the end of the log."""
    deadline = time.monotonic() + within
    while True:
        try:
            if holds():
                return
        except (AssertionError, subprocess.CalledProcessError):
            # It does not answer yet.
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(read_tail(log))
        time.sleep(0.5)


CNI = """{"cniVersion": "1.0.0", "name": "plimsoll", "plugins": [
 {"type": "bridge", "bridge": "plimsoll0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
  "ipam": {"type": "host-local", "dataDir": "FOLDER/cni-data",
           "ranges": [[{"subnet": "10.244.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
"""


def containerd_configuration(folder: Path) -> str:
    return f"""version = 2
root = "{folder}/containerd"
state = "{folder}/containerd-state"
oom_score = 0
[grpc]
  address = "{folder}/containerd.sock"
[ttrpc]
  address = "{folder}/containerd.sock.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  # Where the right to lower a score is missing, sandboxes do not start otherwise.
  restrict_oom_score_adj = true
  disable_apparmor = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
      Root = "{folder}/runc"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"
"""


def kubelet_configuration(folder: Path) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "containerRuntimeEndpoint": f"unix://{folder}/containerd.sock",
        # Images that are removed cannot be pulled again.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%"},
        "address": ADDRESS,
        "readOnlyPort": 0,
        "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "podLogsDir": f"{folder}/pod-logs",
        "resolvConf": "",
        "makeIPTablesUtilChains": False,
        "volumePluginDir": f"{folder}/volume-plugins",
        "nodeStatusUpdateFrequency": "2s",
        "syncFrequency": "5s",
        "crashLoopBackOff": {"maxContainerRestartPeriod": "5s"},
    }


if __name__ == "__main__":
    print(ensure_kubelet())
