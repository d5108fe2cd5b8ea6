"""Pods as the API server returns them, for tests of the node agent."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def build_container(name: str = "main", image: str = "busybox:local", **fields: Any) -> Json:
    return {"name": name, "image": image, **fields}


def build_pod(
    name: str = "web-0",
    containers: tuple[Json, ...] = (build_container(),),
    metadata: Json | None = None,
    status: Json | None = None,
    **spec: Any,
) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-of-{name}",
            "generation": 1,
            **(metadata or {}),
        },
        "spec": {"restartPolicy": "Always", "containers": list(containers), **spec},
        "status": status or {},
    }
