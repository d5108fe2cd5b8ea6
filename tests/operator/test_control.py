"""The control channel over real TLS: the credentials, the token and every kind of answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from plimsoll_operator.control import (
    control_address,
    get_memory_report,
    limits_from_wire,
    limits_to_wire,
    set_limits,
)
from plimsoll_operator.credentials import SERVER_NAME, make_credentials
from plimsoll_operator.tuning.values import Limits, OutcomeKind, Unknown, UnknownReason
from plimsoll_wire import engine_control_pb2 as pb
from plimsoll_wire import engine_control_pb2_grpc as rpc

NOW = 1_800_000_000.0
# The certificate must be valid while the test runs, whenever that is.
CREDENTIALS = make_credentials("assistant", 1_750_000_000.0)


class Engine(rpc.EngineControlServicer):
    """Answers as told, and only to the right token."""

    def __init__(self, outcome: int = pb.APPLIED) -> None:
        self.outcome = outcome
        self.requests: list[pb.SetLimitsRequest] = []

    async def _check(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        metadata = dict(context.invocation_metadata() or ())
        if metadata.get("authorization") != f"Bearer {CREDENTIALS.token.decode()}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")

    async def SetLimits(
        self, request: pb.SetLimitsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.SetLimitsResponse:
        await self._check(context)
        self.requests.append(request)
        return pb.SetLimitsResponse(
            outcome=self.outcome,  # type: ignore[arg-type]
            reason="because",
            revision=request.revision,
            effective=request.limits,
        )

    async def GetMemoryReport(
        self, request: pb.GetMemoryReportRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.MemoryReport:
        await self._check(context)
        return pb.MemoryReport(model="m", device_total_bytes=1000, limits_revision=4)


Serve = Callable[[Engine], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    servers: list[grpc.aio.Server] = []

    async def start(engine: Engine) -> str:
        server = grpc.aio.server()
        servers.append(server)
        rpc.add_EngineControlServicer_to_server(engine, server)  # type: ignore[no-untyped-call]
        secured = grpc.ssl_server_credentials([(CREDENTIALS.key, CREDENTIALS.certificate)])
        port = server.add_secure_port("127.0.0.1:0", secured)
        await server.start()
        return control_address("127.0.0.1", port)

    yield start
    for server in servers:
        await server.stop(None)


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (pb.APPLIED, OutcomeKind.APPLIED),
        (pb.DEFERRED, OutcomeKind.DEFERRED),
        (pb.REJECTED, OutcomeKind.REJECTED),
    ],
)
async def test_limits_arrive_and_the_answer_comes_back(
    serve: Serve, outcome: int, kind: OutcomeKind
) -> None:
    engine = Engine(outcome)
    limits = Limits(max_model_len=4096, gpu_memory_utilization=0.88)
    found = await set_limits(await serve(engine), CREDENTIALS, pod="m-0", revision=7, limits=limits)
    assert (found.kind, found.pod, found.revision) == (kind, "m-0", 7)
    assert found.effective == limits
    assert found.reason == "because"
    (request,) = engine.requests
    assert request.revision == 7
    assert not request.limits.HasField("max_num_seqs")


async def test_an_answer_from_a_later_release(serve: Serve) -> None:
    found = await set_limits(
        await serve(Engine(9)), CREDENTIALS, pod="m-0", revision=1, limits=Limits()
    )
    assert found.kind is OutcomeKind.UNREACHABLE
    assert "outcome 9" in found.reason


async def test_a_wrong_token_is_told_apart(serve: Serve) -> None:
    engine = Engine()
    wrong = replace(CREDENTIALS, token=b"guess")
    address = await serve(engine)
    found = await set_limits(address, wrong, pod="m-0", revision=1, limits=Limits())
    assert found.kind is OutcomeKind.UNAUTHENTICATED
    assert engine.requests == []


async def test_another_certificate_is_not_trusted(serve: Serve) -> None:
    engine = Engine()
    stranger = replace(CREDENTIALS, certificate=make_credentials("other", NOW).certificate)
    address = await serve(engine)
    found = await set_limits(
        address, stranger, pod="m-0", revision=1, limits=Limits(), deadline=2.0
    )
    assert found.kind is OutcomeKind.UNREACHABLE
    assert engine.requests == []


async def test_an_engine_that_has_the_credentials_before_is_reached(serve: Serve) -> None:
    """Between a rotation and the kubelet's turn. The certificates have the same names, as rotated ones do."""
    engine = Engine()
    address = await serve(engine)
    new = make_credentials("assistant", 1_750_000_000.0)
    same_certificate = replace(CREDENTIALS, token=b"new")
    for rotated in (new, same_certificate):
        found = await set_limits(address, rotated, pod="m-0", revision=7, limits=Limits())
        assert found.kind is not OutcomeKind.APPLIED
        both = replace(rotated, previous=CREDENTIALS)
        found = await set_limits(address, both, pod="m-0", revision=7, limits=Limits())
        assert found.kind is OutcomeKind.APPLIED, found
        assert isinstance(await get_memory_report(address, both, pod="m-0"), pb.MemoryReport)
    # And one that has the new ones, by those.
    ahead = replace(CREDENTIALS, previous=new)
    found = await set_limits(address, ahead, pod="m-0", revision=8, limits=Limits())
    assert found.kind is OutcomeKind.APPLIED


async def test_nobody_listens() -> None:
    found = await set_limits(
        "127.0.0.1:9", CREDENTIALS, pod="m-0", revision=1, limits=Limits(), deadline=2.0
    )
    assert found.kind is OutcomeKind.UNREACHABLE
    report = await get_memory_report("127.0.0.1:9", CREDENTIALS, pod="m-0", deadline=2.0)
    assert isinstance(report, Unknown)
    assert report.reason in (UnknownReason.UNREACHABLE, UnknownReason.TIMED_OUT)


async def test_the_memory_report(serve: Serve) -> None:
    report = await get_memory_report(await serve(Engine()), CREDENTIALS, pod="m-0")
    assert isinstance(report, pb.MemoryReport)
    assert (report.model, report.device_total_bytes, report.limits_revision) == ("m", 1000, 4)


@pytest.mark.parametrize(
    "limits",
    [Limits(), Limits(1, 0.5, 2, 3, 0.05, 8, 0.7), Limits(max_num_seqs=8), Limits(watermark=0.0)],
)
def test_absent_limits_stay_absent(limits: Limits) -> None:
    """0.0 is a value; None is none."""
    assert limits_from_wire(limits_to_wire(limits)) == limits


def test_addresses() -> None:
    assert control_address("10.244.0.7") == "10.244.0.7:8001"
    assert control_address("fd00::7") == "[fd00::7]:8001"


def test_the_certificate() -> None:
    made = make_credentials("a" * 80, NOW)
    certificate = x509.load_pem_x509_certificate(made.certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [SERVER_NAME]
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    # An engine whose clock is a little behind trusts it at once.
    assert start.timestamp() == NOW - 3600
    assert (end - start).days == 3650
    key = serialization.load_pem_private_key(made.key, None)
    assert key.public_key() == certificate.public_key()
    assert len(made.token) >= 43


def test_two_deployments_share_nothing() -> None:
    one, two = make_credentials("a", NOW), make_credentials("a", NOW)
    assert one.token != two.token
    assert one.key != two.key
    assert "token" not in repr(one)
