"""A pod's volumes on disk, and what of them each container mounts.

In: the pod's spec, the objects it names, a directory of the pod's own. Out: directories filled, and
the bind mounts for a container, or :class:`VolumeError`. Content of Secrets, ConfigMaps and tokens is
written anew by :meth:`PodVolumes.refresh`. What is not supported is refused by name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from kubernetes.aio.client.exceptions import ApiException

from plimsoll_local.agent.api import Api, Json
from plimsoll_local.agent.atomic import write_files
from plimsoll_local.agent.container import BindMount
from plimsoll_local.agent.content import CONTENT_KINDS, TokenWish, token_wishes, volume_files
from plimsoll_local.agent.environment import ConfigurationError, Facts, Objects, expand
from plimsoll_local.agent.linux import Mount, mount, unmount
from plimsoll_local.agent.logs import parse_time
from plimsoll_local.agent.quantities import parse_bytes

SHARED_MEMORY = "/dev/shm"
# As container runtimes have it; a Memory emptyDir on /dev/shm gives more.
_SHARED_MEMORY_BYTES = 64 << 20
# A token is renewed when this share of its life is over.
_TOKEN_RENEWAL = 0.8


class VolumeError(Exception):
    """A volume cannot be set up as things are; the message names it."""


class PodVolumes:
    """The volumes of one pod under ``directory``."""

    def __init__(
        self, directory: Path, api: Api, objects: Objects, clock: Callable[[], float]
    ) -> None:
        self._directory = directory
        self._api = api
        self._objects = objects
        self._clock = clock
        self._sources: dict[str, Path] = {}
        self._content: set[str] = set()
        self._tmpfs: dict[str, Path] = {}
        self._tokens: dict[TokenWish, tuple[str, float]] = {}

    async def prepare(self, pod: Json, facts: Facts) -> None:
        """Sets up every volume; may be called again after a failure."""
        self._mount_tmpfs(SHARED_MEMORY, self._directory / "shm", _SHARED_MEMORY_BYTES)
        for volume in pod["spec"].get("volumes", ()):
            name = volume["name"]
            try:
                self._sources[name] = await self._prepare_volume(pod, volume, facts)
            except (ConfigurationError, OSError, ValueError) as error:
                raise VolumeError(
                    f'MountVolume.SetUp failed for volume "{name}" : {error}'
                ) from error
            except ApiException as error:
                reason = error.body or error.reason
                raise VolumeError(
                    f'MountVolume.SetUp failed for volume "{name}" : {reason}'
                ) from error

    async def refresh(self, pod: Json, facts: Facts) -> float | None:
        """Writes changed content; returns when a token must be renewed, None if there is none.

        An object that has gone leaves its last content, as under a kubelet."""
        for volume in pod["spec"].get("volumes", ()):
            if CONTENT_KINDS & volume.keys() and volume["name"] in self._sources:
                with contextlib.suppress(ConfigurationError):
                    await self._write_content(pod, volume, facts)
        return min((renew_at for _, renew_at in self._tokens.values()), default=None)

    def mounts(self, container: Json, env: Mapping[str, str]) -> tuple[BindMount, ...]:
        """Raises ConfigurationError for a mount that cannot be made."""
        result = []
        for wanted in container.get("volumeMounts", ()):
            source = self._sources[wanted["name"]]
            read_only = wanted.get("readOnly", False) or wanted["name"] in self._content
            part = wanted.get("subPath") or expand(wanted.get("subPathExpr", ""), env)
            if part:
                source = _sub_path(source, part, create=not read_only)
            result.append(BindMount(str(source), wanted["mountPath"], read_only))
        if not any(m.target.rstrip("/") == SHARED_MEMORY for m in result):
            result.append(BindMount(str(self._tmpfs[SHARED_MEMORY]), SHARED_MEMORY))
        return tuple(result)

    def shared_memory(self, pod: Json, container: Json) -> tuple[str, ...]:
        """The tmpfs directories whose use is this container's alone, and so counts against its
        memory limit."""
        containers = [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]
        result = []
        for name, path in self._tmpfs.items():
            users = [
                c["name"]
                for c in containers
                if name == SHARED_MEMORY
                or any(m["name"] == name for m in c.get("volumeMounts", ()))
            ]
            if users == [container["name"]]:
                result.append(str(path))
        return tuple(result)

    def remove(self) -> None:
        """Unmounts and deletes what is the pod's own."""
        for path in self._tmpfs.values():
            unmount(str(path))
        self._tmpfs.clear()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _prepare_volume(self, pod: Json, volume: Json, facts: Facts) -> Path:
        name = str(volume["name"])
        kind = str(next(key for key in volume if key != "name"))
        own = self._directory / kind / name
        if kind in CONTENT_KINDS:
            await self._write_content(pod, volume, facts)
            self._content.add(name)
            return own
        if kind == "emptyDir":
            source = volume[kind]
            if source.get("medium") == "Memory":
                limit = source.get("sizeLimit")
                self._mount_tmpfs(name, own, None if limit is None else parse_bytes(limit))
            elif source.get("medium"):
                raise ConfigurationError(f"emptyDir medium {source['medium']} is not supported")
            own.mkdir(parents=True, exist_ok=True)
            own.chmod(0o777)
            return own
        if kind == "hostPath":
            return _host_path(volume[kind]["path"], volume[kind].get("type", ""))
        if kind == "persistentVolumeClaim":
            return await self._claimed_path(pod, volume[kind]["claimName"])
        raise ConfigurationError(f"volumes of type {kind} are not supported by this node agent")

    async def _write_content(self, pod: Json, volume: Json, facts: Facts) -> None:
        kind = next(key for key in volume if key in CONTENT_KINDS)
        tokens = {wish: await self._token(pod, wish) for wish in token_wishes(volume)}
        files = volume_files(pod, volume, self._objects, facts, tokens)
        write_files(self._directory / kind / volume["name"], files)

    async def _token(self, pod: Json, wish: TokenWish) -> str:
        token, renew_at = self._tokens.get(wish, ("", 0.0))
        now = self._clock()
        if now < renew_at:
            return token
        audience, seconds = wish
        meta = pod["metadata"]
        account = pod["spec"].get("serviceAccountName", "default")
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {
                "audiences": [audience] if audience else [],
                "expirationSeconds": seconds,
                "boundObjectRef": {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "name": meta["name"],
                    "uid": meta["uid"],
                },
            },
        }
        path = f"/api/v1/namespaces/{meta['namespace']}/serviceaccounts/{account}/token"
        status = (await self._api.request("POST", path, body))["status"]
        life = parse_time(status["expirationTimestamp"]) - now
        self._tokens[wish] = (status["token"], now + life * _TOKEN_RENEWAL)
        return str(status["token"])

    async def _claimed_path(self, pod: Json, claim: str) -> Path:
        namespace = pod["metadata"]["namespace"]
        path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{claim}"
        found = await self._api.request("GET", path)
        if found.get("status", {}).get("phase") != "Bound":
            raise ConfigurationError(f'PersistentVolumeClaim "{claim}" is not bound')
        name = found["spec"]["volumeName"]
        spec = (await self._api.request("GET", f"/api/v1/persistentvolumes/{name}"))["spec"]
        for kind in ("hostPath", "local"):
            if kind in spec:
                return _host_path(spec[kind]["path"], spec[kind].get("type", ""))
        raise ConfigurationError(
            f'PersistentVolume "{name}" must be of type hostPath or local on this node agent'
        )

    def _mount_tmpfs(self, name: str, path: Path, size: int | None) -> None:
        if name in self._tmpfs:
            return
        path.mkdir(parents=True, exist_ok=True)
        options = "mode=1777" if size is None else f"mode=1777,size={size}"
        mount("tmpfs", str(path), "tmpfs", Mount.NO_SUID | Mount.NO_DEV, options)
        self._tmpfs[name] = path


def _host_path(text: str, kind: str) -> Path:
    """The path as a kubelet checks it by the volume's type; an empty type checks nothing."""
    path = Path(text)
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    elif kind == "FileOrCreate" and not path.exists():
        path.touch()
    if kind.startswith("Directory") and not path.is_dir():
        raise ConfigurationError(f"hostPath type check failed: {path} is not a directory")
    if kind.startswith("File") and not path.is_file():
        raise ConfigurationError(f"hostPath type check failed: {path} is not a file")
    if kind in ("Socket", "CharDevice", "BlockDevice", "") and not path.exists():
        raise ConfigurationError(f"hostPath {path} does not exist on this machine")
    return path


def _sub_path(source: Path, part: str, create: bool) -> Path:
    if part.startswith("/") or ".." in Path(part).parts:
        raise ConfigurationError(f"subPath {part!r} must be relative and without '..'")
    path = source / part
    if not path.exists():
        if not create:
            raise ConfigurationError(f"subPath {part!r} does not exist in the volume")
        path.mkdir(parents=True)
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(source)):
        raise ConfigurationError(f"subPath {part!r} leads out of the volume")
    return real
