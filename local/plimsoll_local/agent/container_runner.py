"""Carries out the life of one container: pull, start, hooks, probes, stop, end.

In: orders (start, stop) and the pod's spec. Out: new :class:`ContainerState` values through
``update``, Events, log files. Whether and when to start again is decided in lifecycle.py.
"""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

from plimsoll_local.agent.api import Json
from plimsoll_local.agent.container import BindMount, Exited, StartFailed
from plimsoll_local.agent.container_setup import build_spec, make_empty, read_termination_message
from plimsoll_local.agent.environment import ConfigurationError
from plimsoll_local.agent.events import NORMAL, WARNING
from plimsoll_local.agent.hooks import run_hook
from plimsoll_local.agent.images import Image, ImageTableError
from plimsoll_local.agent.logs import tail_text
from plimsoll_local.agent.node_services import NodeServices, PodAddress
from plimsoll_local.agent.prober import Prober
from plimsoll_local.agent.probes import ProbeKind
from plimsoll_local.agent.process import Container, start_container
from plimsoll_local.agent.state import ContainerState, Running, Terminated, Waiting
from plimsoll_local.agent.tasks import Tasks
from plimsoll_local.agent.volumes import PodVolumes

# A kubelet never kills without at least this long to end.
MIN_GRACE = 2.0
_START_ERROR_STATUS = 128
_CONFIGURATION_RETRY = 5.0


class ContainerRunner:
    """``pod`` gives the latest pod object; ``read`` and ``update`` this container's state."""

    def __init__(
        self,
        services: NodeServices,
        container: Json,
        pod: Callable[[], Json],
        volumes: PodVolumes,
        read: Callable[[], ContainerState],
        update: Callable[[ContainerState], None],
    ) -> None:
        self._services = services
        self._container = container
        self._pod = pod
        self._volumes = volumes
        self._read = read
        self._update = update
        self._name = str(container["name"])
        self._address = PodAddress(None, "")
        self._process: Container | None = None
        self._prober: Prober | None = None
        self._directory = services.pod_directory(pod()) / "containers" / self._name
        self._stop_by: float | None = None
        self._stop_sooner = asyncio.Event()
        self._tasks = Tasks(f"container {pod()['metadata']['name']}/{self._name}")

    def start(self, address: PodAddress, etc_files: Sequence[BindMount]) -> None:
        """Begins one attempt; the result shows in the state."""
        self._address = address
        self._change(starting=True)
        self._tasks.spawn(self._start(etc_files))

    def stop(self, grace: float, message: str) -> None:
        """Asks the container to end within ``grace`` seconds. Asked again it can only get less."""
        stop_by = self._services.clock() + max(grace, MIN_GRACE)
        if self._stop_by is not None:
            if stop_by < self._stop_by:
                self._stop_by = stop_by
                self._stop_sooner.set()
            return
        self._stop_by = stop_by
        self._stop_sooner.clear()
        self._change(stopping=True)
        self._tasks.spawn(self._stop(message))

    async def close(self) -> None:
        """Ends all work at once, the process included."""
        if self._process is not None:
            self._process.signal(signal.SIGKILL)
        if self._prober is not None:
            await self._prober.close()
        await self._tasks.cancel()

    # Start -----------------------------------------------------------------------------------

    async def _start(self, etc_files: Sequence[BindMount]) -> None:
        image = self._pull()
        if image is None:
            return
        before = self._read()
        attempt = before.restart_count + (1 if before.attempted else 0)
        try:
            await self._services.objects.fetch_missing(self._pod())
            await asyncio.to_thread(make_empty, self._directory)
            spec = build_spec(
                self._services,
                self._pod(),
                self._container,
                image,
                self._address,
                self._volumes,
                etc_files,
                self._directory,
                attempt,
            )
        except (ConfigurationError, OSError, ValueError) as error:
            self._refuse("CreateContainerConfigError", str(error), _CONFIGURATION_RETRY)
            return

        container_id = f"plimsoll://{uuid.uuid4().hex}"
        now = self._services.clock()
        ended = before.state if isinstance(before.state, Terminated) else before.last
        back_off = before.crash_back_off
        if ended is not None:
            back_off = self._services.back_off.next(back_off, ended.finished_at, now)
        fresh = ContainerState(
            state=before.state,
            last=ended,
            restart_count=attempt,
            container_id=container_id,
            image_id=f"{self._container['image']}@{image.digest}",
            starting=True,
            crash_back_off=back_off,
        )
        self._event(NORMAL, "Created", f"Created container: {self._name}")
        started = await start_container(spec, self._directory)
        if isinstance(started, StartFailed):
            message = f"failed to start container: {started.message}"
            self._event(WARNING, "Failed", f"Error: {message}")
            failed = Terminated(
                exit_code=_START_ERROR_STATUS,
                reason="StartError",
                message=message,
                started_at=started.at,
                finished_at=started.at,
                container_id=container_id,
            )
            self._update(replace(fresh, state=failed, starting=False))
            return

        self._event(NORMAL, "Started", f"Started container {self._name}")
        self._process = started
        self._stop_by = None
        running = Running(started.started_at)
        self._update(replace(fresh, state=running, starting=False))
        self._tasks.spawn(self._await_end(started, container_id))
        await self._after_start(started)

    async def _after_start(self, process: Container) -> None:
        hook = self._container.get("lifecycle", {}).get("postStart")
        if hook is not None:
            problem = await run_hook(
                hook,
                self._container,
                self._address.ip,
                self._services.http,
                process.execute,
                float("inf"),
            )
            if problem is not None and not process.exited.done():
                self._event(WARNING, "FailedPostStartHook", f"PostStartHook failed: {problem}")
                self.stop(self._grace(), f"Container {self._name} failed postStart hook")
                return
        if not process.exited.done():
            self._prober = Prober(
                self._services,
                self._container,
                process,
                self._address.ip,
                self._judge,
                lambda message: self._event(WARNING, "Unhealthy", message),
            )

    def _pull(self) -> Image | None:
        """Finds the image, or makes the container wait as a failed pull does."""
        reference = self._container["image"]
        state = self._read()
        try:
            image = self._services.images.find(reference)
            detail = "is not in this node's image table, and nothing is pulled from a registry"
        except ImageTableError as error:
            image, detail = None, str(error)
        if image is not None:
            message = f'Container image "{reference}" already present on machine'
            self._event(NORMAL, "Pulled", message)
            return image
        if self._container.get("imagePullPolicy") == "Never":
            message = f'Container image "{reference}" is not present with pull policy of Never'
            self._refuse("ErrImageNeverPull", message, _CONFIGURATION_RETRY)
            return None
        now = self._services.clock()
        problem = f'failed to pull image "{reference}": {detail}'
        back_off = self._services.back_off.next(state.pull_back_off, now, now)
        retry_at = now + back_off.delay
        self._change(starting=False, retry_at=retry_at, pull_back_off=back_off)
        self._event(NORMAL, "Pulling", f'Pulling image "{reference}"')
        self._event(WARNING, "Failed", f'Failed to pull image "{reference}": {problem}')
        self._event(WARNING, "Failed", "Error: ErrImagePull")
        self._change(state=Waiting("ErrImagePull", problem))
        self._tasks.spawn(self._show_pull_back_off(reference, problem, retry_at))
        return None

    async def _show_pull_back_off(self, reference: str, problem: str, retry_at: float) -> None:
        """ErrImagePull is what just happened; ImagePullBackOff is what it then waits in."""
        await asyncio.sleep(min(1.0, (retry_at - self._services.clock()) / 2))
        state = self._read()
        if state.retry_at != retry_at or state.starting:
            return
        message = f'Back-off pulling image "{reference}": ErrImagePull: {problem}'
        self._event(NORMAL, "BackOff", f'Back-off pulling image "{reference}"')
        self._event(WARNING, "Failed", "Error: ImagePullBackOff")
        self._change(state=Waiting("ImagePullBackOff", message))

    def _refuse(self, reason: str, message: str, seconds: float) -> None:
        self._event(WARNING, "Failed", f"Error: {message}")
        state = self._read()
        last = state.state if isinstance(state.state, Terminated) else state.last
        self._change(
            starting=False,
            state=Waiting(reason, message),
            last=last,
            retry_at=self._services.clock() + seconds,
        )

    # Probes ----------------------------------------------------------------------------------

    def _judge(self, kind: ProbeKind, healthy: bool) -> None:
        if kind is ProbeKind.READINESS:
            self._change(ready=healthy)
        elif healthy:
            self._change(started=True)
        else:
            probe = self._container[kind.field]
            grace = float(probe.get("terminationGracePeriodSeconds", self._grace()))
            message = f"Container {self._name} failed {kind.value} probe, will be restarted"
            self.stop(grace, message)

    # End -------------------------------------------------------------------------------------

    async def _stop(self, message: str) -> None:
        process = self._process
        if process is None or self._stop_by is None:
            return
        self._event(NORMAL, "Killing", message or f"Stopping container {self._name}")
        if self._prober is not None:
            self._prober.stop_killing()
        hook = self._container.get("lifecycle", {}).get("preStop")
        if hook is not None:
            await self._run_pre_stop(hook, process)
        process.signal(self._stop_signal())
        while not process.exited.done():
            self._stop_sooner.clear()
            left = self._stop_by - self._services.clock()
            if left <= 0:
                process.signal(signal.SIGKILL)
                await asyncio.shield(process.exited)
                return
            sooner = asyncio.create_task(self._stop_sooner.wait())
            await asyncio.wait(
                (process.exited, sooner), timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            sooner.cancel()

    async def _run_pre_stop(self, hook: Json, process: Container) -> None:
        left = max(0.0, (self._stop_by or 0.0) - self._services.clock())
        running = asyncio.create_task(
            run_hook(
                hook,
                self._container,
                self._address.ip,
                self._services.http,
                process.execute,
                left,
            )
        )
        sooner = asyncio.create_task(self._stop_sooner.wait())
        await asyncio.wait(
            (running, process.exited, sooner), timeout=left, return_when=asyncio.FIRST_COMPLETED
        )
        sooner.cancel()
        if running.done():
            problem = running.result()
        else:
            running.cancel()
            problem = None if process.exited.done() else "did not end within the grace period"
        if problem is not None:
            self._event(WARNING, "FailedPreStopHook", f"PreStopHook failed: {problem}")

    def _stop_signal(self) -> signal.Signals:
        name = self._container.get("lifecycle", {}).get("stopSignal", "SIGTERM")
        return signal.Signals.__members__.get(name, signal.SIGTERM)

    def _grace(self) -> float:
        return float(self._pod()["spec"].get("terminationGracePeriodSeconds", 30))

    async def _await_end(self, process: Container, container_id: str) -> None:
        ended = await asyncio.shield(process.exited)
        if self._prober is not None:
            await self._prober.close()
        self._prober = self._process = None
        self._stop_by = None
        state = self._read()
        self._change(
            state=Terminated(
                exit_code=ended.exit_code,
                reason=_reason(ended),
                message=self._termination_message(ended, state.restart_count),
                started_at=process.started_at,
                finished_at=ended.at,
                container_id=container_id,
            ),
            started=False,
            ready=False,
            stopping=False,
        )

    def _termination_message(self, ended: Exited, attempt: int) -> str:
        text = read_termination_message(self._directory)
        policy = self._container.get("terminationMessagePolicy")
        if not text and policy == "FallbackToLogsOnError" and ended.exit_code != 0:
            text = tail_text(self._services.log_file(self._pod(), self._name, attempt), 80, 2048)
        return text

    # -----------------------------------------------------------------------------------------

    def _change(self, **fields: object) -> None:
        self._update(replace(self._read(), **fields))  # type: ignore[arg-type]

    def _event(self, kind: str, reason: str, message: str) -> None:
        self._services.events.record(self._pod(), kind, reason, message, self._container)


def _reason(ended: Exited) -> str:
    if ended.out_of_memory:
        return "OOMKilled"
    return "Completed" if ended.exit_code == 0 else "Error"
