"""From a container of a pod spec to the ContainerSpec that a shim runs.

In: pod and container as API JSON, image, address, volumes, a directory of the container's own. Out: a
ContainerSpec, with the files it names made; ConfigurationError for what cannot be resolved.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from plimsoll_local.agent.api import Json
from plimsoll_local.agent.container import BindMount, ContainerSpec
from plimsoll_local.agent.environment import ConfigurationError, build_environment, expand_all
from plimsoll_local.agent.hosts import host_name
from plimsoll_local.agent.images import Image
from plimsoll_local.agent.node_services import NodeServices, PodAddress
from plimsoll_local.agent.quantities import parse_bytes
from plimsoll_local.agent.volumes import PodVolumes

_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DEFAULT_TERMINATION_LOG = "/dev/termination-log"
_MAX_TERMINATION_MESSAGE = 4096


def make_empty(directory: Path) -> None:
    """What an earlier attempt left goes: a container starts from its image alone."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


def build_spec(
    services: NodeServices,
    pod: Json,
    container: Json,
    image: Image,
    address: PodAddress,
    volumes: PodVolumes,
    etc_files: Sequence[BindMount],
    directory: Path,
    attempt: int,
) -> ContainerSpec:
    """``directory`` is empty; ``attempt`` counts the container's starts from 0."""
    name = host_name(pod)
    facts = services.facts(address.ip)
    # /tmp is the one place that every container may write to.
    image_env = {"PATH": _DEFAULT_PATH, "HOME": "/tmp", "HOSTNAME": name, **image.env}
    env = build_environment(pod, container, image_env, services.objects, facts)
    argv = image.argv(
        expand_all(container.get("command", ()), env), expand_all(container.get("args", ()), env)
    )
    if not argv:
        raise ConfigurationError(
            f'no command specified: image "{container["image"]}" has no entrypoint'
        )
    termination_log = _termination_log(directory)
    termination_log.touch()
    termination_log.chmod(0o666)
    target = container.get("terminationMessagePath", _DEFAULT_TERMINATION_LOG)
    limit = container.get("resources", {}).get("limits", {}).get("memory")
    for part in ("root", "scratch"):
        (directory / part).mkdir()
    return ContainerSpec(
        argv=argv,
        env=env,
        working_directory=container.get("workingDir") or image.working_directory,
        host_name=name,
        network_namespace=address.namespace,
        root=str(directory / "root"),
        scratch=str(directory / "scratch"),
        log_file=str(_prepare_log(services.log_file(pod, container["name"], attempt), attempt)),
        mounts=(
            *etc_files,
            *volumes.mounts(container, env),
            BindMount(str(termination_log), target),
        ),
        writable=image.writable,
        readable=image.readable,
        hidden=(str(services.directory),),
        memory_limit=None if limit is None else parse_bytes(limit),
        shared_memory=volumes.shared_memory(pod, container),
    )


def read_termination_message(directory: Path) -> str:
    """What the container wrote, at most 4096 bytes; "" for nothing."""
    try:
        with _termination_log(directory).open("rb") as file:
            return file.read(_MAX_TERMINATION_MESSAGE).decode(errors="replace")
    except FileNotFoundError:
        return ""


def _termination_log(directory: Path) -> Path:
    return directory / "termination-log"


def _prepare_log(log_file: Path, attempt: int) -> Path:
    log_file.parent.mkdir(parents=True, exist_ok=True)
    # As a kubelet keeps them: this attempt's and the one before.
    for old in log_file.parent.glob("*.log"):
        if int(old.stem) < attempt - 1:
            old.unlink()
    log_file.touch()
    return log_file
