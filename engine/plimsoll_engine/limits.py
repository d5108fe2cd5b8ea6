"""Limits that move while the engine serves: values, bounds, and the file read at start.

In: what the operator asks for, and what is in force. Out: the limits to be in force, or the reason
why not, naming field, value and what is allowed. This module knows neither the pool's blocks nor
the channel the request came by; bytes and blocks are ``memory``'s.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

# The operator speaks camelCase in limits.json, as Kubernetes objects do.
_FILE_KEYS = {
    "maxModelLen": "max_model_len",
    "gpuMemoryUtilization": "gpu_memory_utilization",
    "maxNumSeqs": "max_num_seqs",
    "maxNumBatchedTokens": "max_num_batched_tokens",
    "watermark": "watermark",
}


class LimitsOutcome(StrEnum):
    APPLIED = "applied"
    # Accepted; in force when blocks above the new line have been freed.
    DEFERRED = "deferred"
    REJECTED = "rejected"


@dataclass(frozen=True)
class Limits:
    """In a request, None leaves that limit as it is; limits in force have no None.

    ``max_model_len`` is the admitted length: prompt plus requested output, in tokens.
    """

    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    watermark: float | None = None


@dataclass(frozen=True)
class LimitsResult:
    """``revision`` and ``effective`` are those in force after the call, whatever its outcome."""

    outcome: LimitsOutcome
    reason: str
    revision: int
    effective: Limits


class LimitsFileError(ValueError):
    """The limits file cannot be used; the message says why."""
