"""The Secret of the control channel: serving certificate, its key and a bearer token."""

from __future__ import annotations

import base64
from typing import Any

from plimsoll_operator import names
from plimsoll_operator.desired.metadata import owned
from plimsoll_operator.observed import Credentials
from plimsoll_operator.spec import Deployment


def build_control_secret(deployment: Deployment, credentials: Credentials) -> dict[str, Any]:
    """The credentials come in as values: made once, then read back from the cluster until they are
    rotated. Engines read the first three alone."""
    further: dict[str, str] = {}
    if deployment.in_groups:
        further[names.GROUP_TOKEN_KEY] = _encoded(credentials.group)
    if credentials.previous is not None:
        further[names.PREVIOUS_CERTIFICATE] = _encoded(credentials.previous.certificate)
        further[names.PREVIOUS_TOKEN] = _encoded(credentials.previous.token)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": owned(deployment, names.control_secret(deployment.name)),
        "type": "Opaque",
        "data": {
            "tls.crt": _encoded(credentials.certificate),
            "tls.key": _encoded(credentials.key),
            "token": _encoded(credentials.token),
            **further,
        },
    }


def _encoded(value: bytes) -> str:
    return base64.b64encode(value).decode()
