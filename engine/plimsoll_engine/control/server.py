"""EngineControl over gRPC, with gRPC health and reflection: the operator's way into one engine.

With credentials the channel is TLS, every call but a health check needs the token, and the port is
open to the pod's network; they are asked for anew with every handshake and call. Without them it
listens on the loopback address alone. The server has its own threads, so a busy HTTP side never
delays a limit; and calls that last get only some of them.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from plimsoll_engine.config import ConfigError
from plimsoll_engine.control.credentials import ControlCredentials
from plimsoll_engine.control.reports import (
    EngineIdentity,
    build_limits_response,
    build_memory_report,
    limits_from_wire,
)
from plimsoll_engine.limits import Limits, LimitsResult
from plimsoll_wire import engine_control_pb2 as wire
from plimsoll_wire import engine_control_pb2_grpc as wire_grpc

if TYPE_CHECKING:
    from plimsoll_engine.core import EngineCore

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
# What is in force now.
Credentials: TypeAlias = Callable[[], ControlCredentials]

SERVICE_NAME = wire.DESCRIPTOR.services_by_name["EngineControl"].full_name
HEALTH_SERVICE = f"/{health.SERVICE_NAME}/"
# One thread per call. What lasts (a stream, a drain) holds its thread, so there may be only so many
# of each at once that some are always left for limits and reports.
WORKERS = 16
MAX_WATCHERS = 8
MAX_DRAINS = 2
MAX_REFLECTIONS = 2
# A client that has vanished without a word is found out by pings, and its streams end.
KEEPALIVE_SECONDS = 20
KEEPALIVE_ANSWER_SECONDS = 10
WATCH_INTERVAL_SECONDS = 1.0
MAX_DRAIN_SECONDS = 3600.0


class Controlled(Protocol):
    """What a channel drives: an engine's core or the gate. Called on the channel's threads."""

    def build_report(self) -> wire.MemoryReport: ...

    def set_limits(self, revision: int, limits: Limits) -> LimitsResult: ...

    def drain(self, timeout: float) -> wire.DrainResponse: ...


class ControlledCore:
    def __init__(self, core: EngineCore, identity: EngineIdentity) -> None:
        self._core = core
        self._identity = identity

    def build_report(self) -> wire.MemoryReport:
        return build_memory_report(self._identity, self._core.snapshot())

    def set_limits(self, revision: int, limits: Limits) -> LimitsResult:
        return self._core.set_limits(revision, limits)

    def drain(self, timeout: float) -> wire.DrainResponse:
        drained = self._core.drain(timeout)
        now = self._core.snapshot()
        return wire.DrainResponse(drained=drained, running=now.running, waiting=now.waiting)


class Places:
    """So many calls of one method may last at the same time."""

    def __init__(self, method: str, number: int) -> None:
        self._method = method
        self._number = number
        self._free = threading.Semaphore(number)

    @contextmanager
    def take(self, context: grpc.ServicerContext) -> Iterator[None]:
        """Ends the call with RESOURCE_EXHAUSTED when there is no place for it."""
        if not self._free.acquire(blocking=False):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._method}: {self._number} such calls are open; allowed: at most that many "
                "at once, so that limits can always be set",
            )
        try:
            yield
        finally:
            self._free.release()


class EngineControl(wire_grpc.EngineControlServicer):
    def __init__(self, controlled: Controlled) -> None:
        self._controlled = controlled
        self._watchers = Places("WatchState", MAX_WATCHERS)
        self._drains = Places("Drain", MAX_DRAINS)
        self._stopping = threading.Event()

    def GetMemoryReport(
        self, request: wire.GetMemoryReportRequest, context: grpc.ServicerContext
    ) -> wire.MemoryReport:
        return self._controlled.build_report()

    def SetLimits(
        self, request: wire.SetLimitsRequest, context: grpc.ServicerContext
    ) -> wire.SetLimitsResponse:
        limits = limits_from_wire(request.limits)
        return build_limits_response(self._controlled.set_limits(request.revision, limits))

    def WatchState(
        self, request: wire.WatchStateRequest, context: grpc.ServicerContext
    ) -> Iterator[wire.MemoryReport]:
        sent: wire.MemoryReport | None = None
        ended = threading.Event()
        context.add_callback(ended.set)
        with self._watchers.take(context):
            while not self._stopping.is_set() and not ended.is_set():
                report = self._controlled.build_report()
                if sent is None or _state(report) != _state(sent):
                    sent = report
                    yield report
                ended.wait(WATCH_INTERVAL_SECONDS)

    def Drain(
        self, request: wire.DrainRequest, context: grpc.ServicerContext
    ) -> wire.DrainResponse:
        if not 0 <= request.timeout_seconds <= MAX_DRAIN_SECONDS:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"timeout_seconds: {request.timeout_seconds} is not allowed; expected a number "
                f"from 0 to {MAX_DRAIN_SECONDS:.0f}",
            )
        with self._drains.take(context):
            return self._controlled.drain(request.timeout_seconds)

    def stop(self) -> None:
        """Ends the streams, at the latest after their next look."""
        self._stopping.set()


class Reflection(reflection.ReflectionServicer):
    """A client may leave its stream open."""

    def __init__(self, service_names: Sequence[str]) -> None:
        super().__init__(service_names)
        self._places = Places("ServerReflectionInfo", MAX_REFLECTIONS)

    def ServerReflectionInfo(self, request_iterator: Iterable[Any], context: Any) -> Iterator[Any]:
        with self._places.take(context):
            yield from super().ServerReflectionInfo(request_iterator, context)


class ControlChannel:
    """Listens from construction on, answers from ``start`` on."""

    def __init__(
        self,
        controlled: Controlled,
        *,
        port: int,
        credentials: Credentials | None,
    ) -> None:
        """``port`` 0 takes a free one. Raises ConfigError when the port cannot be had."""
        self._control = EngineControl(controlled)
        self._health = health.HealthServicer()
        self._server = grpc.server(
            ThreadPoolExecutor(WORKERS, thread_name_prefix="control"),
            interceptors=[] if credentials is None else [BearerAuth(credentials)],
            options=[
                # Two engines must never share a port by mistake.
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
                ("grpc.keepalive_timeout_ms", KEEPALIVE_ANSWER_SECONDS * 1000),
                ("grpc.http2.ping_timeout_ms", KEEPALIVE_ANSWER_SECONDS * 1000),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )
        register: Callable[..., None] = wire_grpc.add_EngineControlServicer_to_server
        register(self._control, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        register_reflection: Callable[..., None] = (
            reflection_pb2_grpc.add_ServerReflectionServicer_to_server
        )
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        register_reflection(Reflection(names), self._server)
        self.port = self._listen(port, credentials)

    def _listen(self, port: int, credentials: Credentials | None) -> int:
        try:
            if credentials is None:
                return self._server.add_insecure_port(f"127.0.0.1:{port}")
            return self._server.add_secure_port(f"[::]:{port}", _server_credentials(credentials))
        except RuntimeError as error:
            raise ConfigError("--control-port", port, f"a port that is free ({error})") from None

    def start(self) -> None:
        self._server.start()
        self.set_serving(True)

    def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        value = status.SERVING if serving else status.NOT_SERVING
        for service in ("", SERVICE_NAME):
            self._health.set(service, value)

    def stop(self, grace_seconds: float = 1.0) -> None:
        self._control.stop()
        self._server.stop(grace_seconds).wait(grace_seconds)


class ControlServer(ControlChannel):
    """The channel of an engine's core."""

    def __init__(
        self,
        core: EngineCore,
        identity: EngineIdentity,
        *,
        port: int,
        credentials: Credentials | None,
    ) -> None:
        """As ControlChannel."""
        super().__init__(ControlledCore(core, identity), port=port, credentials=credentials)


class BearerAuth(grpc.ServerInterceptor):
    """Refuses every call without the token, health checks apart: probes carry none."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

        def refuse(request: object, context: grpc.ServicerContext) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the bearer token is missing or wrong")

        self._refusal: Handler = grpc.unary_unary_rpc_method_handler(refuse)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        if handler_call_details.method.startswith(HEALTH_SERVICE):
            return continuation(handler_call_details)
        given = dict(handler_call_details.invocation_metadata).get("authorization", "")
        given_bytes = given if isinstance(given, bytes) else given.encode()
        expected = f"Bearer {self._credentials().token}".encode()
        if hmac.compare_digest(given_bytes, expected):
            return continuation(handler_call_details)
        return self._refusal


def _server_credentials(credentials: Credentials) -> grpc.ServerCredentials:
    """With the certificate in force at each handshake."""

    def configuration() -> grpc.ServerCertificateConfiguration:
        now = credentials()
        return grpc.ssl_server_certificate_configuration([(now.key, now.certificate)])

    return grpc.dynamic_ssl_server_credentials(configuration(), configuration)


def _state(report: wire.MemoryReport) -> bytes:
    """The report without what moves by itself while nothing happens."""
    copy = wire.MemoryReport()
    copy.CopyFrom(report)
    copy.step_heartbeat_age_seconds = 0
    return copy.SerializeToString(deterministic=True)
