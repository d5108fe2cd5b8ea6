"""Carries one pod from its first sight to its end.

In: the pod object as it changes, and what happens to its containers. Out: running containers, status
patches when the status differs, Events; at the end the deletion of the API object. What to do next is
decided in lifecycle.py and what to report in status.py; this module only carries it out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace

from kubernetes.aio.client.exceptions import ApiException

from plimsoll_local.agent.api import CONNECTION_ERRORS, STRATEGIC_MERGE, Json
from plimsoll_local.agent.container import BindMount
from plimsoll_local.agent.container_runner import ContainerRunner
from plimsoll_local.agent.events import WARNING
from plimsoll_local.agent.hosts import RESOLVER_CONFIGURATION, host_name, hosts_file
from plimsoll_local.agent.lifecycle import (
    Action,
    BackOffContainer,
    FailPod,
    PrepareSandbox,
    ReleaseSandbox,
    RemovePod,
    StartContainer,
    StopContainer,
    is_deleted,
    next_actions,
)
from plimsoll_local.agent.node_services import NodeServices, PodAddress
from plimsoll_local.agent.state import (
    ContainerState,
    PodContainers,
    Terminated,
    Waiting,
    observe_new,
)
from plimsoll_local.agent.status import build_patch, build_status
from plimsoll_local.agent.tasks import Tasks
from plimsoll_local.agent.unsupported import ignored_fields
from plimsoll_local.agent.volumes import PodVolumes, VolumeError
from plimsoll_local.network import AddressesExhausted

log = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0


class PodWorker:
    """One pod by UID. ``pods`` lists all pods of the node, for their names in /etc/hosts."""

    def __init__(
        self, services: NodeServices, pod: Json, pods: Callable[[], Iterable[Json]]
    ) -> None:
        self.pod = pod
        self.observed = observe_new(pod, services.clock())
        self._services = services
        self._pods = pods
        self._wake = asyncio.Event()
        self._address = PodAddress(None, "")
        self._networked = False
        self._volumes = PodVolumes(
            services.pod_directory(pod) / "volumes", services.api, services.objects, services.clock
        )
        self._runners = {
            name: self._make_runner(name, container)
            for name, container in PodContainers.of(pod).by_name.items()
        }
        self._published: Json | None = None
        self._tasks = Tasks(f"pod {pod['metadata']['namespace']}/{pod['metadata']['name']}")
        self._refresh_at: float | None = None
        self._refreshing = asyncio.Lock()
        self._gone = False

    def see(self, pod: Json) -> None:
        """The API object has changed."""
        relabelled = any(
            pod["metadata"].get(field) != self.pod["metadata"].get(field)
            for field in ("labels", "annotations")
        )
        self.pod = pod
        if relabelled and self.observed.sandbox:
            self._tasks.spawn(self._refresh_content())
        self._wake.set()

    def vanish(self) -> None:
        """The API object is gone without waiting for this node: a forced deletion."""
        self._gone = True
        meta = {"deletionTimestamp": "now", **self.pod["metadata"], "deletionGracePeriodSeconds": 0}
        self.see({**self.pod, "metadata": meta})

    def content_changed(self) -> None:
        """A Secret or ConfigMap the pod names has changed."""
        if self.observed.sandbox:
            self._tasks.spawn(self._refresh_content())
        self.observed = replace(self.observed, retry_at=None)
        for name, state in self.observed.containers.items():
            if isinstance(state.state, Waiting) and state.state.reason.endswith("ConfigError"):
                self._set_container(name, replace(state, retry_at=None))
        self._wake.set()

    def write_hosts(self) -> None:
        """Brings /etc/hosts up to date, in place: containers have this very file mounted."""
        if self.observed.sandbox:
            text = hosts_file(
                self.pod, self._address.ip, self._services.objects.services(), self._pods()
            )
            path = self._services.pod_directory(self.pod) / "etc" / "hosts"
            if not path.exists() or path.read_text() != text:
                path.write_text(text)

    async def run(self) -> None:
        """Works until the pod is deleted and gone; cancellation kills what runs."""
        self._warn_of_ignored_fields()
        try:
            while True:
                self._wake.clear()
                now = self._services.clock()
                plan = next_actions(self.pod, self.observed, now, self._services.back_off)
                removed = RemovePod() in plan.actions
                for action in plan.actions:
                    self._perform(action)
                await self._publish()
                if removed and await self._remove():
                    return
                times = [t for t in (plan.wake_at, self._refresh_at) if t is not None]
                wait = max(0.0, min(times) - self._services.clock()) if times else None
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), wait)
                if self._refresh_at is not None and self._services.clock() >= self._refresh_at:
                    self._refresh_at = None
                    self._tasks.spawn(self._refresh_content())
        finally:
            await self._close()

    def _make_runner(self, name: str, container: Json) -> ContainerRunner:
        return ContainerRunner(
            self._services,
            container,
            pod=lambda: self.pod,
            volumes=self._volumes,
            read=lambda: self.observed.containers[name],
            update=lambda state: self._set_container(name, state),
        )

    def _set_container(self, name: str, state: ContainerState) -> None:
        self.observed = self.observed.with_container(name, state)
        self._wake.set()

    def _perform(self, action: Action) -> None:
        match action:
            case PrepareSandbox():
                self.observed = replace(self.observed, preparing=True)
                self._tasks.spawn(self._prepare())
            case StartContainer(name):
                self._runners[name].start(self._address, self._etc_files())
            case BackOffContainer(name, until, delay):
                self._back_off(name, until, delay)
            case StopContainer(name, grace, reason):
                self._runners[name].stop(grace, reason)
            case FailPod(failure):
                self.observed = replace(self.observed, failure=failure)
                self._services.events.record(self.pod, WARNING, failure.reason, failure.message)
                self._wake.set()
            case ReleaseSandbox():
                self._release()
                self._wake.set()
            case RemovePod():
                pass  # after the last status is written

    def _back_off(self, name: str, until: float, delay: float) -> None:
        state = self.observed.containers[name]
        meta = self.pod["metadata"]
        full_name = f"{meta['name']}_{meta['namespace']}({meta['uid']})"
        message = f"back-off {delay:g}s restarting failed container={name} pod={full_name}"
        self._services.events.record(
            self.pod,
            WARNING,
            "BackOff",
            f"Back-off restarting failed container {name} in pod {full_name}",
            PodContainers.of(self.pod).by_name[name],
        )
        last = state.state if isinstance(state.state, Terminated) else state.last
        waiting = Waiting("CrashLoopBackOff", message)
        self._set_container(name, replace(state, state=waiting, last=last, retry_at=until))

    # Sandbox ---------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        """Network first: volumes may show the pod's address."""
        retry_at: float | None = None
        try:
            if not self._networked:
                self._address = await self._create_network()
                self._networked = True
            self.observed = replace(self.observed, pod_ip=self._address.ip)
            await self._services.objects.fetch_missing(self.pod)
            facts = self._services.facts(self._address.ip)
            await self._volumes.prepare(self.pod, facts)
            self._refresh_at = await self._volumes.refresh(self.pod, facts)
            self._write_etc()
        except VolumeError as error:
            self._services.events.record(self.pod, WARNING, "FailedMount", str(error))
            retry_at = self._services.clock() + _RETRY_SECONDS
        except (OSError, AddressesExhausted) as error:
            message = f"Failed to create pod sandbox: {error}"
            self._services.events.record(self.pod, WARNING, "FailedCreatePodSandBox", message)
            retry_at = self._services.clock() + _RETRY_SECONDS
        except CONNECTION_ERRORS as error:
            log.warning("preparing %s: %s", self.pod["metadata"]["name"], error)
            retry_at = self._services.clock() + _RETRY_SECONDS
        self.observed = replace(
            self.observed, preparing=False, sandbox=retry_at is None, retry_at=retry_at
        )
        self.write_hosts()
        self._wake.set()

    async def _create_network(self) -> PodAddress:
        if self.pod["spec"].get("hostNetwork"):
            return PodAddress(None, self._services.host_ip)
        uid = self.pod["metadata"]["uid"]
        found = await asyncio.to_thread(self._services.network.create, uid)
        return PodAddress(str(found.path), found.ip)

    def _write_etc(self) -> None:
        directory = self._services.pod_directory(self.pod) / "etc"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "hosts").touch()
        (directory / "hostname").write_text(host_name(self.pod) + "\n")
        (directory / "resolv.conf").write_text(RESOLVER_CONFIGURATION)

    def _etc_files(self) -> tuple[BindMount, ...]:
        directory = self._services.pod_directory(self.pod) / "etc"
        return tuple(
            BindMount(str(directory / name), f"/etc/{name}")
            for name in ("hosts", "hostname", "resolv.conf")
        )

    def _release(self) -> None:
        """Gives the network back and unmounts; logs stay for ``kubectl logs``."""
        if self._networked and not self.pod["spec"].get("hostNetwork"):
            self._services.network.delete(self.pod["metadata"]["uid"])
        self._networked = False
        self._volumes.remove()
        self.observed = replace(self.observed, sandbox=False)
        self._refresh_at = None

    async def _refresh_content(self) -> None:
        async with self._refreshing:
            if not self.observed.sandbox:
                return
            facts = self._services.facts(self._address.ip)
            try:
                self._refresh_at = await self._volumes.refresh(self.pod, facts)
            except (ApiException, *CONNECTION_ERRORS) as error:
                log.warning("refreshing volumes of %s: %s", self.pod["metadata"]["name"], error)
                self._refresh_at = self._services.clock() + _RETRY_SECONDS
        self._wake.set()

    # API object ------------------------------------------------------------------------------

    def _warn_of_ignored_fields(self) -> None:
        if not self.observed.sandbox and not is_deleted(self.pod):
            for text in ignored_fields(self.pod):
                self._services.events.record(self.pod, WARNING, "Unsupported", text)

    def _path(self) -> str:
        meta = self.pod["metadata"]
        return f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"

    async def _publish(self) -> None:
        """Writes the status if it differs from the one written last."""
        if self._gone:
            return
        now = self._services.clock()
        # What happens to the pod while the patch is on its way belongs into the next one.
        pod, observed = self.pod, self.observed
        status = build_status(pod, observed, self._services.host_ip, now)
        if status == self._published:
            return
        body = build_patch(pod, status)
        try:
            answer = await self._services.api.request(
                "PATCH", f"{self._path()}/status", body, content_type=STRATEGIC_MERGE
            )
        except ApiException as error:
            if error.status in (404, 409):
                return  # deleted, or another pod of the same name: the watch will say so
            log.warning("status of %s: %s %s", self._path(), error.status, error.reason)
            self._wake_later()
        except CONNECTION_ERRORS as error:
            log.warning("status of %s: %s", self._path(), error or type(error).__name__)
            self._wake_later()
        else:
            self.pod = {**self.pod, "status": answer["status"]}
            known = {**pod, "status": answer["status"]}
            self._published = build_status(known, observed, self._services.host_ip, now)

    async def _remove(self) -> bool:
        """Frees everything and deletes the API object; False when that must be tried again."""
        if self.observed.sandbox or self._networked:
            self._release()
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": self.pod["metadata"]["uid"]},
        }
        if not self._gone:
            try:
                await self._services.api.request("DELETE", self._path(), body)
            except ApiException as error:
                if error.status not in (404, 409):
                    log.warning("deleting %s: %s %s", self._path(), error.status, error.reason)
                    self._wake_later()
                    return False
            except CONNECTION_ERRORS as error:
                log.warning("deleting %s: %s", self._path(), error or type(error).__name__)
                self._wake_later()
                return False
        self._services.events.forget(self.pod)
        return True

    def _wake_later(self) -> None:
        asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._wake.set)

    async def _close(self) -> None:
        await self._tasks.cancel()
        await asyncio.gather(*(runner.close() for runner in self._runners.values()))
        if self._networked:
            self._release()
        for directory in (
            self._services.pod_directory(self.pod),
            self._services.log_directory(self.pod),
        ):
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
