"""The node's HTTPS server: ``kubectl logs`` comes here through the API server.

In: requests of the kubelet's API. Out: container logs; 501 for exec, attach and port-forward, which
need protocol upgrades that are not offered. The server has a certificate of its own making and asks
for no credentials: only what is inside the cluster's network namespace can reach it.
"""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from plimsoll_local.agent.logs import LogOptions, parse_time, read_log, read_new_lines

# How soon a follower sees a new line.
_FOLLOW_PERIOD = 0.2


class LogLookup:
    """What the server asks the agent; see :meth:`NodeAgent.find_log`."""

    def __init__(
        self,
        find: Callable[[str, str, str, bool], Path],
        is_running: Callable[[str, str, str], bool],
    ) -> None:
        self.find = find
        self.is_running = is_running


class LogNotFoundError(Exception):
    """There is no such pod, container or earlier attempt; the message says which."""


def build_application(logs: LogLookup) -> web.Application:
    """The kubelet's routes."""
    application = web.Application()

    async def container_logs(request: web.Request) -> web.StreamResponse:
        namespace, pod, container = (
            request.match_info[part] for part in ("namespace", "pod", "container")
        )
        try:
            options = parse_log_options(request.query, time.time())
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        previous = _flag(request.query, "previous")
        try:
            path = logs.find(namespace, pod, container, previous)
        except LogNotFoundError as error:
            raise web.HTTPNotFound(text=str(error)) from error
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        text, offset = await asyncio.to_thread(read_log, path, options)
        await response.write(text)
        while options.follow and not previous:
            running = logs.is_running(namespace, pod, container)
            text, offset = read_new_lines(path, offset, options)
            if text:
                await response.write(text)
            elif not running:
                break
            else:
                await asyncio.sleep(_FOLLOW_PERIOD)
        await response.write_eof()
        return response

    async def unsupported(request: web.Request) -> web.StreamResponse:
        verb = request.path.split("/")[1]
        raise web.HTTPNotImplemented(
            text=f"{verb} is not supported by the local node agent; kubectl logs is"
        )

    async def healthz(request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok")

    application.router.add_get("/containerLogs/{namespace}/{pod}/{container}", container_logs)
    application.router.add_get("/healthz", healthz)
    for verb in ("exec", "attach", "portForward", "run"):
        application.router.add_route("*", f"/{verb}/{{rest:.*}}", unsupported)
    return application


def parse_log_options(query: Mapping[str, str], now: float) -> LogOptions:
    """Raises ValueError naming the field that cannot be read."""
    since: float | None = None
    if text := query.get("sinceTime"):
        since = parse_time(text)
    if (seconds := _number(query, "sinceSeconds")) is not None:
        since = now - seconds
    return LogOptions(
        follow=_flag(query, "follow"),
        timestamps=_flag(query, "timestamps"),
        tail_lines=_number(query, "tailLines"),
        since=since,
        limit_bytes=_number(query, "limitBytes"),
    )


def _flag(query: Mapping[str, str], name: str) -> bool:
    return query.get(name, "").lower() in ("true", "1")


def _number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name)
    if text is None:
        return None
    if not text.isdigit():
        raise ValueError(f"{name}={text!r}: must be a whole number of at least 0")
    return int(text)


def make_certificate(directory: Path, address: str) -> ssl.SSLContext:
    """A server context with a fresh self-signed certificate for ``address``."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "plimsoll-local node agent")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=365))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    path = directory / "server.pem"
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context
