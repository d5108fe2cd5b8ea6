"""The files of --control-dir: a certificate, its key and a bearer token.

In: the folder a Secret is mounted at. Out: their contents as they are now, or a ConfigError that names
the file.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from plimsoll_engine.config import ConfigError

log = logging.getLogger(__name__)

_FILES = ("tls.crt", "tls.key", "token")


@dataclass(frozen=True)
class ControlCredentials:
    """PEM texts, and the token that clients send as ``authorization: Bearer TOKEN``."""

    certificate: bytes
    key: bytes = field(repr=False)
    token: str = field(repr=False)


class CredentialFiles:
    """The kubelet changes a mounted Secret while the engine runs; what is damaged, or half written,
    leaves the last good credentials in force. May be asked by several threads."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError for credentials that cannot be used."""
        self._directory = directory
        self._lock = Lock()
        self._contents = _read_files(directory)
        self._current = _parse(directory, self._contents)

    def current(self) -> ControlCredentials:
        with self._lock:
            try:
                contents = _read_files(self._directory)
                if contents != self._contents:
                    self._current = _parse(self._directory, contents)
                    self._contents = contents
                    log.info("the control channel has new credentials")
            except ConfigError as error:
                log.warning("the control channel keeps its credentials: %s", error)
            return self._current


def _read_files(directory: Path) -> dict[str, bytes]:
    contents = {}
    for name in _FILES:
        try:
            contents[name] = (directory / name).read_bytes().strip()
        except OSError as error:
            raise ConfigError(
                "--control-dir", directory, f"a folder with a readable {name} ({error.strerror})"
            ) from None
        if not contents[name]:
            raise ConfigError("--control-dir", directory, f"a folder whose {name} is not empty")
    return contents


def _parse(directory: Path, contents: dict[str, bytes]) -> ControlCredentials:
    def wrong(expected: str) -> ConfigError:
        return ConfigError("--control-dir", directory, f"a folder whose {expected}")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(cadata=contents["tls.crt"].decode("ascii"))
    except (OSError, ValueError) as error:
        raise wrong(f"tls.crt is a certificate in PEM form ({error})") from None
    try:
        # An encrypted key must not ask for its password on a terminal.
        context.load_cert_chain(directory / "tls.crt", directory / "tls.key", password="")
    except (OSError, ValueError) as error:
        raise wrong(f"tls.key is the key of tls.crt, in PEM form ({error})") from None
    try:
        token = contents["token"].decode("ascii")
    except UnicodeDecodeError:
        raise wrong("token is printable ASCII") from None
    if not token.isprintable():
        raise wrong("token is printable ASCII")
    return ControlCredentials(contents["tls.crt"], contents["tls.key"], token)
