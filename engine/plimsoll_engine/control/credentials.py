"""The files of --control-dir: a certificate, its key and a bearer token.

In: the folder a Secret is mounted at. Out: their contents, or a ConfigError that names the file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from plimsoll_engine.config import ConfigError


@dataclass(frozen=True)
class ControlCredentials:
    """PEM texts, and the token that clients send as ``authorization: Bearer TOKEN``."""

    certificate: bytes
    key: bytes = field(repr=False)
    token: str = field(repr=False)


def read_credentials(directory: Path) -> ControlCredentials:
    """Raises ConfigError for a file that is missing, unreadable or empty."""
    contents = {}
    for name in ("tls.crt", "tls.key", "token"):
        try:
            contents[name] = (directory / name).read_bytes().strip()
        except OSError as error:
            raise ConfigError(
                "--control-dir", directory, f"a folder with a readable {name} ({error.strerror})"
            ) from None
        if not contents[name]:
            raise ConfigError("--control-dir", directory, f"a folder whose {name} is not empty")
    return ControlCredentials(
        contents["tls.crt"], contents["tls.key"], contents["token"].decode(errors="replace")
    )
