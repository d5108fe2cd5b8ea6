"""Small pods of one container for the local cluster's node agent."""

from __future__ import annotations

from typing import Any

from support.local_cluster import Json

PYTHON = "python:local"
SHELL = "busybox:local"
# Answers GET on port 8080.
SERVER = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=8080, bind='0.0.0.0')"


def pod(name: str, container: Json, **spec: Any) -> Json:
    # One second: nothing here needs longer to end, and a shell has no handler for SIGTERM.
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "main", "image": SHELL, **container}],
            **spec,
        },
    }


def shell(text: str, **fields: Any) -> Json:
    return {"command": ["sh", "-c", text], **fields}


def python(text: str, **fields: Any) -> Json:
    return {"image": PYTHON, "command": ["python3", "-c", text], **fields}
