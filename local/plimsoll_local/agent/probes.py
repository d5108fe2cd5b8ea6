"""Startup, liveness and readiness probes.

In: a probe of the pod spec, the pod's address, ways to run a command. Out: verdicts. The counting of
thresholds is a pure value (:class:`ProbeCount`); one try of a probe is :func:`try_probe`; when to
try is :class:`ProbeSchedule`. What follows from a verdict is decided elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import aiohttp

from plimsoll_local.agent.api import Json
from plimsoll_local.agent.container import ExecResult

# What a kubelet keeps of an answer or an output for its message.
_MAX_TEXT = 1024


class ProbeKind(Enum):
    STARTUP = "startup"
    LIVENESS = "liveness"
    READINESS = "readiness"

    @property
    def field(self) -> str:
        """The name in the container's spec."""
        return f"{self.value}Probe"

    @property
    def title(self) -> str:
        return self.value.capitalize()


@dataclass(frozen=True)
class ProbeResult:
    """One try, with what was seen."""

    success: bool
    message: str = ""


@dataclass(frozen=True)
class ProbeSchedule:
    """Seconds and counts with the API's defaults."""

    initial_delay: float
    period: float
    timeout: float
    success_threshold: int
    failure_threshold: int

    @classmethod
    def of(cls, probe: Json) -> ProbeSchedule:
        return cls(
            initial_delay=float(probe.get("initialDelaySeconds", 0)),
            period=float(probe.get("periodSeconds", 10)),
            timeout=float(probe.get("timeoutSeconds", 1)),
            success_threshold=int(probe.get("successThreshold", 1)),
            failure_threshold=int(probe.get("failureThreshold", 3)),
        )


@dataclass(frozen=True)
class ProbeCount:
    """How many results in a row were the same. ``verdict`` is None until a threshold is reached,
    and then the last verdict reached."""

    verdict: bool | None = None
    last: bool | None = None
    run: int = 0

    def add(self, success: bool, schedule: ProbeSchedule) -> ProbeCount:
        run = self.run + 1 if success == self.last else 1
        needed = schedule.success_threshold if success else schedule.failure_threshold
        verdict = success if run >= needed else self.verdict
        return ProbeCount(verdict, success, run)


Execute = Callable[[Sequence[str], float], Awaitable[ExecResult]]


async def try_probe(
    probe: Json,
    container: Json,
    address: str,
    session: aiohttp.ClientSession,
    execute: Execute,
) -> ProbeResult:
    """One try. A try that takes longer than the probe's timeout is a failure."""
    seconds = ProbeSchedule.of(probe).timeout
    if "exec" in probe:
        return await _try_exec(probe["exec"]["command"], execute, seconds)
    if "httpGet" in probe:
        return await try_http(probe["httpGet"], container, address, session, seconds)
    if "tcpSocket" in probe:
        action = probe["tcpSocket"]
        port = resolve_port(action["port"], container)
        return await _try_tcp(action.get("host") or address, port, seconds)
    kind = next((key for key in probe if key == "grpc"), "this")
    return ProbeResult(False, f"{kind} probes are not supported by this node agent")


def resolve_port(port: int | str, container: Json) -> int:
    """A port number, or the number of the container port with that name.

    Raises ValueError when there is no such name."""
    for declared in container.get("ports", ()):
        if declared.get("name") == port:
            return int(declared["containerPort"])
    try:
        return int(port)
    except ValueError:
        raise ValueError(f"couldn't find port: {port}") from None


async def try_http(
    action: Json, container: Json, address: str, session: aiohttp.ClientSession, seconds: float
) -> ProbeResult:
    """GET as the kubelet does it: 2xx and 3xx are success, certificates are not checked."""
    scheme = action.get("scheme", "HTTP").lower()
    host = action.get("host") or address
    headers = {h["name"]: h["value"] for h in action.get("httpHeaders", ())}
    headers.setdefault("User-Agent", "kube-probe/1.36")
    path = action.get("path", "/")
    try:
        port = resolve_port(action["port"], container)
        url = f"{scheme}://{host}:{port}/{path.removeprefix('/')}"
        async with (
            asyncio.timeout(seconds),
            session.get(url, headers=headers, allow_redirects=False, ssl=False) as response,
        ):
            body = await response.content.read(_MAX_TEXT)
            if 200 <= response.status < 400:
                return ProbeResult(True, body.decode(errors="replace"))
            return ProbeResult(False, f"HTTP probe failed with statuscode: {response.status}")
    except TimeoutError:
        return ProbeResult(False, f'Get "{url}": context deadline exceeded')
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return ProbeResult(False, f"Get: {error or type(error).__name__}")


async def _try_tcp(host: str, port: int, seconds: float) -> ProbeResult:
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
        return ProbeResult(True)
    except TimeoutError:
        return ProbeResult(False, f"dial tcp {host}:{port}: i/o timeout")
    except OSError as error:
        return ProbeResult(False, f"dial tcp {host}:{port}: {error.strerror or error}")


async def _try_exec(command: Sequence[str], execute: Execute, seconds: float) -> ProbeResult:
    try:
        result = await execute(command, seconds)
    except TimeoutError:
        return ProbeResult(False, f"command {list(command)} timed out after {seconds:g}s")
    return ProbeResult(result.exit_code == 0, result.output[:_MAX_TEXT])
