"""The client of an engine's control channel (gRPC EngineControl over TLS, with a bearer token).

In: a pod, the deployment's credentials, limits. Out: what the engine answered, or why it did not;
no exception of the channel ever comes out. Each call opens and closes its own channel: a pod's
address lives no longer than the pod, and one handshake per change is cheap.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import grpc

from plimsoll_operator import names
from plimsoll_operator.credentials import SERVER_NAME
from plimsoll_operator.observed import Credentials
from plimsoll_operator.tuning.values import (
    FIELDS,
    Limits,
    LimitsOutcome,
    OutcomeKind,
    Unknown,
    UnknownReason,
)
from plimsoll_wire import engine_control_pb2 as pb
from plimsoll_wire import engine_control_pb2_grpc as rpc

# Seconds for one call with its handshake. The engine answers between two steps of its loop, and
# on a slow CPU one step takes seconds.
DEADLINE = 10.0

_KINDS = {
    pb.APPLIED: OutcomeKind.APPLIED,
    pb.DEFERRED: OutcomeKind.DEFERRED,
    pb.REJECTED: OutcomeKind.REJECTED,
}
_DENIED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
# Of a failed handshake, and of a connection that is refused.
_NO_CHANNEL = grpc.StatusCode.UNAVAILABLE

Answer = TypeVar("Answer")
Metadata = tuple[tuple[str, str], ...]


def control_address(ip: str, port: int = names.CONTROL_PORT) -> str:
    """``ip:port`` as gRPC wants it, also for IPv6."""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


async def set_limits(
    address: str,
    credentials: Credentials,
    *,
    pod: str,
    revision: int,
    limits: Limits,
    deadline: float = DEADLINE,
) -> LimitsOutcome:
    """Asks the engine at ``address`` to put ``limits`` in force; repeating it does no harm."""
    request = pb.SetLimitsRequest(revision=revision, limits=limits_to_wire(limits))

    async def send(engine: rpc.EngineControlStub, metadata: Metadata) -> pb.SetLimitsResponse:
        answer: pb.SetLimitsResponse = await engine.SetLimits(
            request, timeout=deadline, metadata=metadata
        )
        return answer

    try:
        answer = await _ask(address, credentials, send)
    except grpc.aio.AioRpcError as error:
        denied = error.code() in _DENIED
        kind = OutcomeKind.UNAUTHENTICATED if denied else OutcomeKind.UNREACHABLE
        return LimitsOutcome(kind, pod, revision, _explain(address, error))
    if (kind_or_none := _KINDS.get(answer.outcome)) is None:
        reason = f"{address} answered outcome {answer.outcome}, which this operator does not know"
        return LimitsOutcome(OutcomeKind.UNREACHABLE, pod, revision, reason)
    return LimitsOutcome(
        kind_or_none,
        pod,
        answer.revision,
        answer.reason,
        limits_from_wire(answer.effective) if answer.HasField("effective") else None,
    )


async def get_memory_report(
    address: str, credentials: Credentials, *, pod: str, deadline: float = DEADLINE
) -> pb.MemoryReport | Unknown:
    """What the engine planned, what it uses and the limits in force."""

    async def send(engine: rpc.EngineControlStub, metadata: Metadata) -> pb.MemoryReport:
        request = pb.GetMemoryReportRequest()
        report: pb.MemoryReport = await engine.GetMemoryReport(
            request, timeout=deadline, metadata=metadata
        )
        return report

    try:
        return await _ask(address, credentials, send)
    except grpc.aio.AioRpcError as error:
        timed_out = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        reason = UnknownReason.TIMED_OUT if timed_out else UnknownReason.UNREACHABLE
        return Unknown(reason, pod, _explain(address, error))


def limits_to_wire(limits: Limits) -> pb.Limits:
    """None stays absent: the engine leaves that limit as it is."""
    return pb.Limits(
        max_model_len=limits.max_model_len,
        gpu_memory_utilization=limits.gpu_memory_utilization,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        watermark=limits.watermark,
        long_prompt_tokens=limits.long_prompt_tokens,
        long_prompt_share=limits.long_prompt_share,
    )


def limits_from_wire(limits: pb.Limits) -> Limits:
    """Absent becomes None, never 0. Both sides have the same names."""
    return Limits(
        **{name: getattr(limits, name) for name in FIELDS.values() if limits.HasField(name)}
    )


async def _ask(
    address: str,
    credentials: Credentials,
    send: Callable[[rpc.EngineControlStub, Metadata], Awaitable[Answer]],
) -> Answer:
    """By the credentials before, where the engine has not got the new ones yet: it then refuses the
    token, or shows a certificate that the new one does not vouch for."""
    try:
        async with _engine(address, credentials) as engine:
            return await send(engine, _metadata(credentials))
    except grpc.aio.AioRpcError as error:
        if credentials.previous is None or error.code() not in (*_DENIED, _NO_CHANNEL):
            raise
    async with _engine(address, credentials.previous) as engine:
        return await send(engine, _metadata(credentials.previous))


@asynccontextmanager
async def _engine(address: str, credentials: Credentials) -> AsyncIterator[rpc.EngineControlStub]:
    secured = grpc.ssl_channel_credentials(root_certificates=credentials.certificate)
    # A proxy of the environment must not come between the operator and a pod.
    options = (("grpc.ssl_target_name_override", SERVER_NAME), ("grpc.enable_http_proxy", 0))
    async with grpc.aio.secure_channel(address, secured, options) as channel:
        yield rpc.EngineControlStub(channel)  # type: ignore[no-untyped-call]  # generated code


def _metadata(credentials: Credentials) -> Metadata:
    return (("authorization", f"Bearer {credentials.token.decode()}"),)


def _explain(address: str, error: grpc.aio.AioRpcError) -> str:
    return f"{address}: {error.code().name} {error.details() or ''}".rstrip()
