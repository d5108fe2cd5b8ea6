"""Who gets a port, when that is known, and which setting is blamed when nobody can."""

from __future__ import annotations

import socket

import pytest

from plimsoll_engine.config import ConfigError
from plimsoll_engine.server.listener import bind, listen


def port_of(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_is_bound_is_taken_though_nobody_listens_yet(host: str) -> None:
    with bind("127.0.0.1", 0) as first:
        with pytest.raises(ConfigError) as refused:
            bind(host, port_of(first))
        assert refused.value.field == "--port"
        assert f"{host}:{port_of(first)}" in str(refused.value)
        # Nor does a program that binds with SO_REUSEADDR get it.
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port_of(first)))


def leave_in_time_wait(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()) as client:
        accepted, _ = listener.accept()
        # Who closes first keeps the connection's remains.
        accepted.close()
        assert client.recv(1) == b""


def test_an_engine_that_restarts_gets_its_port_back_at_once_and_alone() -> None:
    first = bind("127.0.0.1", 0)
    port = port_of(first)
    listen(first)
    leave_in_time_wait(first)
    first.close()
    with bind("127.0.0.1", port) as second:
        with pytest.raises(ConfigError, match="--port"):
            bind("127.0.0.1", port)
        listen(second)
        leave_in_time_wait(second)
    with bind("127.0.0.1", port) as third:
        listen(third)


def test_a_port_that_is_lost_after_all_is_told_as_the_port_too() -> None:
    with socket.socket() as ours, socket.socket() as other:
        for each in (ours, other):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", 0 if each is ours else port_of(ours)))
        other.listen()
        with pytest.raises(ConfigError) as refused:
            listen(ours)
    assert refused.value.field == "--port"


@pytest.mark.parametrize("host", ["a..b", f"{'a' * 64}.example", "8.8.8.8", "\udcff", "300.1.1.1"])
def test_a_host_that_cannot_be_had_is_blamed_on_the_host(host: str) -> None:
    with pytest.raises(ConfigError) as refused:
        bind(host, 0)
    assert refused.value.field == "--host"
    assert "an address of this machine" in refused.value.allowed


def test_the_port_is_named_after_the_setting_that_it_is_from() -> None:
    with bind("127.0.0.1", 0) as first, pytest.raises(ConfigError) as refused:
        bind("127.0.0.1", port_of(first), flag="--control-port")
    assert refused.value.field == "--control-port"
