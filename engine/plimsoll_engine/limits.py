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
    "longPromptTokens": "long_prompt_tokens",
    "longPromptShare": "long_prompt_share",
    "longQueueShare": "long_queue_share",
}
_WHOLE = frozenset({"maxModelLen", "maxNumSeqs", "maxNumBatchedTokens", "longPromptTokens"})

# Far above any model's length, and far below what any integer of a library holds.
MAX_LENGTH = 2**31 - 1
# As good as no bound.
MAX_QUEUE_SHARE = 1000


class LimitsOutcome(StrEnum):
    APPLIED = "applied"
    # Accepted; in force when blocks above the new line have been freed.
    DEFERRED = "deferred"
    REJECTED = "rejected"


@dataclass(frozen=True)
class Limits:
    """In a request, None leaves that limit as it is; limits in force have no None, but for
    ``long_prompt_tokens``, where no prompt is long then, and ``long_queue_share``, where long prompts
    that wait have no bound of their own.

    ``max_model_len`` is the admitted length: prompt plus requested output, in tokens.
    """

    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    watermark: float | None = None
    long_prompt_tokens: int | None = None
    long_prompt_share: float | None = None
    long_queue_share: float | None = None


@dataclass(frozen=True)
class LimitsResult:
    """``revision`` and ``effective`` are those in force after the call, whatever its outcome."""

    outcome: LimitsOutcome
    reason: str
    revision: int
    effective: Limits


class LimitsFileError(ValueError):
    """The limits file cannot be used; the message says why."""


@dataclass(frozen=True)
class LimitBounds:
    """Fixed at start. The batch's are those that were profiled: more was never measured."""

    ceiling: int
    max_num_seqs: int
    max_num_batched_tokens: int


def merge_limits(current: Limits, asked: Limits) -> Limits:
    return dataclasses.replace(
        current, **{name: value for name, value in vars(asked).items() if value is not None}
    )


def find_violation(limits: Limits, bounds: LimitBounds) -> str | None:
    """The first field out of its bounds with its value and what is allowed; absent ones pass."""
    high = {
        "max_model_len": (bounds.ceiling, "the ceiling"),
        "max_num_seqs": (bounds.max_num_seqs, "the value at start"),
        "max_num_batched_tokens": (bounds.max_num_batched_tokens, "the value at start"),
    }
    for name, (highest, what) in high.items():
        value = getattr(limits, name)
        if value is not None and not 1 <= value <= highest:
            return f"{name}: {value} is not allowed; expected 1 to {highest} ({what})"
    utilization, watermark = limits.gpu_memory_utilization, limits.watermark
    if utilization is not None and not 0 < utilization <= 1:
        return f"gpu_memory_utilization: {utilization} is not allowed; expected above 0, at most 1"
    if watermark is not None and not 0 <= watermark < 1:
        return f"watermark: {watermark} is not allowed; expected 0 or more, below 1"
    long, share = limits.long_prompt_tokens, limits.long_prompt_share
    if long is not None and not 1 <= long <= MAX_LENGTH:
        return f"long_prompt_tokens: {long} is not allowed; expected 1 to {MAX_LENGTH}"
    if share is not None and not 0 < share <= 1:
        return f"long_prompt_share: {share} is not allowed; expected above 0, at most 1"
    queue = limits.long_queue_share
    if queue is not None and not 0 < queue <= MAX_QUEUE_SHARE:
        return (
            f"long_queue_share: {queue} is not allowed; expected above 0, at most {MAX_QUEUE_SHARE}"
        )
    seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    if seqs is not None and tokens is not None and seqs > tokens:
        return f"max_num_seqs: {seqs} is not allowed; expected at most max_num_batched_tokens ({tokens})"
    return None


def read_limits_file(path: Path) -> tuple[int, Limits] | None:
    """Revision and limits that the operator left; None for a missing or empty file.

    Raises LimitsFileError. Keys that this version does not know are passed over.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise LimitsFileError(f"{path}: {error}") from error
    if not text.strip():
        return None
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise LimitsFileError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, Mapping) or not isinstance(document.get("limits"), Mapping):
        raise LimitsFileError(f'{path}: expected {{"revision": ..., "limits": {{...}}}}')
    revision = _number(path, "revision", document.get("revision"), whole=True)
    values = {
        attribute: _number(path, key, document["limits"][key], whole=key in _WHOLE)
        for key, attribute in _FILE_KEYS.items()
        if document["limits"].get(key) is not None
    }
    return int(revision), Limits(**values)  # type: ignore[arg-type]


def _number(path: Path, key: str, value: object, *, whole: bool) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LimitsFileError(f"{path}: {key}: {value!r} is not a number")
    if whole and not isinstance(value, int):
        raise LimitsFileError(f"{path}: {key}: {value!r} is not a whole number")
    return value
