"""Why an engine process ends: failure classes, exit status and the JSON termination message.

In: an :class:`EngineFailure`. Out: one line of JSON in the pod's termination log and on stderr, and
the exit status. The operator reads that line; its keys are a contract (docs/architecture.md).
This module knows neither torch nor the server.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

# The kubelet's default terminationMessagePath, and the most it reads back.
TERMINATION_LOG = Path("/dev/termination-log")
MAX_MESSAGE_BYTES = 4096


class FailureClass(StrEnum):
    INVALID_CONFIGURATION = "InvalidConfiguration"
    MODEL_LOAD_FAILED = "ModelLoadFailed"
    MODEL_TOO_LARGE = "ModelTooLarge"
    KV_TOO_SMALL_FOR_MAX_LEN = "KVTooSmallForMaxLen"
    DEVICE_OOM_AT_START = "CudaOOMAtStart"
    DEVICE_OOM_AT_RUNTIME = "CudaOOMAtRuntime"
    DEVICE_BUSY_AT_START = "GPUBusyAtStart"
    DEVICE_FAULT = "GPUFault"
    COLLECTIVE_FAILURE = "CollectiveFailure"
    ENGINE_DEAD = "EngineDead"


class Phase(StrEnum):
    CONFIGURATION = "configuration"
    LOAD = "load"
    PROFILE = "profile"
    KV_CACHE = "kv_cache"
    WARMUP = "warmup"
    SERVING = "serving"


@dataclass
class EngineFailure(Exception):
    """Ends the process. ``figures`` are plain numbers (bytes, tokens); ``suggestion`` is the
    nearest setting that works, as flag and value, when one is known."""

    failure_class: FailureClass
    phase: Phase
    message: str
    figures: dict[str, int | float | str] = field(default_factory=dict)
    suggestion: dict[str, str | int | float] | None = None

    def __post_init__(self) -> None:
        super().__init__(self.message)

    @property
    def exit_status(self) -> int:
        return 2 if self.failure_class is FailureClass.INVALID_CONFIGURATION else 1

    def to_json(self) -> str:
        """One line of at most MAX_MESSAGE_BYTES; the message is cut, never the class."""
        document = {
            "class": self.failure_class.value,
            "phase": self.phase.value,
            "message": self.message,
            "figures": self.figures,
            "suggestion": self.suggestion,
        }
        line = json.dumps(document)
        surplus = len(line.encode()) - MAX_MESSAGE_BYTES
        if surplus > 0:
            document["message"] = self.message[: max(0, len(self.message) - surplus - 3)] + "..."
            line = json.dumps(document)
        return line


def write_termination_message(failure: EngineFailure) -> None:
    """Writes to the path in TERMINATION_LOG_PATH (the kubelet's default otherwise) and stderr."""
    line = failure.to_json()
    print(line, file=sys.stderr, flush=True)
    path = Path(os.environ.get("TERMINATION_LOG_PATH", TERMINATION_LOG))
    if path.exists():
        path.write_text(line)
