"""What the control channel is secured with: damaged files are named, changed ones are taken over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from plimsoll_engine.config import ConfigError
from plimsoll_engine.control.credentials import CredentialFiles
from plimsoll_engine.control.reports import EngineIdentity
from plimsoll_engine.control.server import ControlServer
from plimsoll_wire import engine_control_pb2 as wire
from plimsoll_wire import engine_control_pb2_grpc as wire_grpc
from support.certificates import Pair, make_pair
from support.engine_server import api_server

TIMEOUT = 20


PAIR = make_pair()
PEM_OF_NOTHING = b"-----BEGIN CERTIFICATE-----\nbm90aGluZw==\n-----END CERTIFICATE-----"


def write_secret(directory: Path, pair: Pair = PAIR, token: bytes = b"secret") -> None:
    contents = {"tls.crt": pair.certificate, "tls.key": pair.key, "token": token}
    for name, content in contents.items():
        (directory / name).write_bytes(content + b"\n")


@pytest.mark.parametrize("missing", ["tls.crt", "tls.key", "token"])
def test_a_missing_file_of_the_secret_is_named(tmp_path: Path, missing: str) -> None:
    write_secret(tmp_path)
    assert CredentialFiles(tmp_path).current().token == "secret"
    (tmp_path / missing).unlink()
    with pytest.raises(ConfigError, match=f"readable {missing}"):
        CredentialFiles(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tls.crt", b"\n"),
        ("tls.crt", b"garbage"),
        ("tls.crt", b"\xff\x00\xfe"),
        ("tls.crt", PEM_OF_NOTHING),
        ("tls.key", b"\n"),
        ("tls.key", b"garbage"),
        ("tls.key", b"\xff\x00\xfe"),
        ("tls.key", make_pair().key),
        ("token", b"\n"),
        ("token", b"\xff\xfe"),
        ("token", "schlüssel".encode()),
        ("token", b"two\nlines"),
    ],
)
def test_damaged_credentials_name_the_file_and_leave_those_in_force(
    tmp_path: Path, name: str, content: bytes
) -> None:
    write_secret(tmp_path)
    files = CredentialFiles(tmp_path)
    before = files.current()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"--control-dir.*{name}"):
        CredentialFiles(tmp_path)
    assert files.current() == before


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ControlServer, Path]]:
    directory = tmp_path_factory.mktemp("control")
    write_secret(directory, PAIR, b"first")
    with api_server() as server:
        control = ControlServer(
            server.core,
            EngineIdentity("0.1.0", "m", "cpu", 1),
            port=0,
            credentials=CredentialFiles(directory).current,
        )
        control.start()
        yield control, directory
        control.stop()


def ask(control: ControlServer, trusted: Pair, token: str) -> str:
    secured = grpc.ssl_channel_credentials(trusted.certificate)
    with grpc.secure_channel(f"127.0.0.1:{control.port}", secured) as channel:
        stub = wire_grpc.EngineControlStub(channel)  # type: ignore[no-untyped-call]
        metadata = [("authorization", f"Bearer {token}")]
        report: wire.MemoryReport = stub.GetMemoryReport(
            wire.GetMemoryReportRequest(), timeout=TIMEOUT, metadata=metadata
        )
        return report.model


def test_a_running_engine_takes_over_a_new_secret(serving: tuple[ControlServer, Path]) -> None:
    control, directory = serving
    assert ask(control, PAIR, "first") == "m"
    renewed = make_pair()
    write_secret(directory, renewed, b"second")
    assert ask(control, renewed, "second") == "m"
    for trusted, token, code in (
        (renewed, "first", grpc.StatusCode.UNAUTHENTICATED),
        (PAIR, "second", grpc.StatusCode.UNAVAILABLE),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            ask(control, trusted, token)
        assert refused.value.code() is code
