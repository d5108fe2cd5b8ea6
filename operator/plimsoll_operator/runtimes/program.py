"""What runs in an engine pod, as far as runtimes differ; the pod builder makes containers of it.

Values and small builders of Kubernetes' own structures. Knows no engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from plimsoll_operator import names
from plimsoll_operator.spec import KeyRef, Model, ModelSource

Json = dict[str, Any]

SCRATCH_DIR = "/scratch"
TMP_DIR = "/tmp"


@dataclass(frozen=True)
class Program:
    """One container. ``image`` None: the operator's own version of this project's. ``mounts`` are
    the pod's volumes that it sees, by name; None: all. ``resources`` None: the spec's, accelerators
    included. ``serves``: the HTTP API and the control channel are its ports."""

    name: str
    image: str | None
    command: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: tuple[Json, ...]
    probes: Json
    mounts: frozenset[str] | None = None
    resources: Json | None = None
    serves: bool = True


@dataclass(frozen=True)
class Programs:
    """``main`` serves. ``before`` is a native sidecar: main starts when its start-up probe has
    answered, and it is asked to stop when main has ended."""

    main: Program
    before: Program | None = None


def startup_failures(model: Model, period: int) -> int:
    """How often the start-up probe may fail, asked every ``period`` seconds."""
    return max(1, math.ceil(model.startup_timeout / period))


def compiled_dir(model: Model) -> str:
    """Where compilers keep what they make: with ``compiled`` beside the weights, so that the next pod
    finds it. They key it themselves by versions and device."""
    return names.COMPILED_DIR if model.cache.compiled else SCRATCH_DIR


def offline(model: Model) -> list[Json]:
    """After a prefetch the weights are there, and their volume is read-only."""
    if not model.cache.prefetch:
        return []
    return [value("HF_HUB_OFFLINE", "1"), value("HF_MODULES_CACHE", f"{SCRATCH_DIR}/modules")]


def model_path(model: Model) -> str:
    """What an engine is told to load: a name of the hub, or a path in the container."""
    return f"/{model.location.lstrip('/')}" if model.source is ModelSource.FILE else model.location


def http_probe(path: str, *, period: int, timeout: int, failures: int) -> Json:
    return {
        "httpGet": {"path": path, "port": "http", "scheme": "HTTP"},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }


def value(name: str, text: str) -> Json:
    return {"name": name, "value": text}


def from_field(name: str, path: str) -> Json:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def from_limit(name: str, resource: str) -> Json:
    """A limit of the engine's container."""
    reference = {"containerName": names.ENGINE_CONTAINER, "resource": resource}
    return {"name": name, "valueFrom": {"resourceFieldRef": reference}}


def from_secret(name: str, ref: KeyRef) -> Json:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": ref.name, "key": ref.key}}}


def with_users(ours: Iterable[Json], theirs: Iterable[Json]) -> tuple[Json, ...]:
    """The user's own variables last; a name that is already set is replaced."""
    own = {variable["name"]: variable for variable in ours}
    users = {variable["name"]: dict(variable) for variable in theirs}
    return tuple((own | users).values())
