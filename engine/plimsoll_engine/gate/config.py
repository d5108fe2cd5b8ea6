"""The gate's settings: flags and environment in, one frozen value or a ConfigError out.

Names that the engine has too mean the same here. This module knows nothing of the upstream.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TypeVar
from urllib.parse import urlsplit

from plimsoll_engine.config import ConfigError, parse_bytes, parse_length
from plimsoll_engine.limits import MAX_LENGTH, MAX_QUEUE_SHARE

Value = TypeVar("Value")

MAX_REQUESTS = 1_000_000
MAX_SECONDS = 86400


@dataclass(frozen=True)
class GateConfig:
    """Lengths in tokens, sizes in bytes."""

    # Without a slash at its end.
    upstream: str
    # None: the upstream's own max_model_len.
    max_model_len: int | None = None
    # Limits are never set below it.
    min_model_len: int = 1
    # Sequences that are at the upstream at once; what comes above it waits here.
    max_num_seqs: int = 256
    max_num_queued_reqs: int = 1024
    # Prompt tokens of all that wait together; None: no bound.
    max_num_queued_tokens: int | None = None
    # None: no prompt is long.
    long_prompt_tokens: int | None = None
    long_prompt_share: float = 1.0
    # None: long prompts that wait have no bound of their own.
    long_queue_share: float | None = None
    # A tokenizer.json: texts are counted here, not by the upstream.
    tokenizer: Path | None = None
    max_body: int = 32 * 1024**2
    api_key: str | None = field(default=None, repr=False)
    host: str = "0.0.0.0"
    port: int = 8000
    # 0: no control channel.
    control_port: int = 8002
    control_dir: Path | None = None
    limits_file: Path | None = None
    shutdown_timeout: float = 30.0


def parse_args(argv: Sequence[str], environ: Mapping[str, str]) -> GateConfig:
    """Raises ConfigError. ``--help`` prints and raises SystemExit(0)."""
    given, unknown = _build_parser().parse_known_args(list(argv))
    if unknown:
        raise ConfigError("arguments", " ".join(unknown), "only the flags that --help lists")
    if given.upstream is None:
        raise ConfigError("--upstream", "", "the URL of vLLM, such as http://127.0.0.1:8001")
    values: dict[str, object] = {}
    for name, reader in _READERS.items():
        if (text := getattr(given, name)) is not None:
            values[name] = _read(f"--{name.replace('_', '-')}", text, reader)
    if "api_key" not in values and environ.get("PLIMSOLL_API_KEY"):
        values["api_key"] = environ["PLIMSOLL_API_KEY"]
    config = GateConfig(**values)  # type: ignore[arg-type]
    _check_together(config)
    return config


def _check_together(config: GateConfig) -> None:
    if config.max_model_len is not None and config.min_model_len > config.max_model_len:
        raise ConfigError(
            "--min-model-len", config.min_model_len, f"at most {config.max_model_len}, the ceiling"
        )
    if config.port == config.control_port:
        raise ConfigError("--control-port", config.control_port, "another port than --port's")


def _read(flag: str, text: str, reader: Callable[[str], Value]) -> Value:
    try:
        return reader(text)
    except ValueError as error:
        raise ConfigError(flag, "***" if flag == "--api-key" else text, str(error)) from None


def _url(text: str) -> str:
    parts = urlsplit(text)
    try:
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or parts.username:
        raise ValueError("an address such as http://127.0.0.1:8001")
    return text.rstrip("/")


def _length(text: str) -> int:
    length = parse_length(text)
    if length is None:
        raise ValueError(f"a number of tokens from 1 to {MAX_LENGTH}")
    return length


def _whole(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        digits = text.isascii() and text.isdigit() and len(text) <= 20
        if not digits or not low <= int(text) <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return int(text)

    return read


def _real(low: float, high: float, allowed: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise ValueError(allowed) from None
        if not math.isfinite(number) or not low <= number <= high:
            raise ValueError(allowed)
        return number

    return read


def _share(text: str) -> float:
    allowed = "a number above 0, at most 1"
    share = _real(0, 1, allowed)(text)
    if share == 0:
        raise ValueError(allowed)
    return share


def _queue_share(text: str) -> float:
    allowed = f"a number above 0, at most {MAX_QUEUE_SHARE}"
    share = _real(0, MAX_QUEUE_SHARE, allowed)(text)
    if share == 0:
        raise ValueError(allowed)
    return share


def _text(text: str) -> str:
    if not text:
        raise ValueError("a text that is not empty")
    return text


_READERS: dict[str, Callable[[str], object]] = {
    "upstream": _url,
    "max_model_len": _length,
    "min_model_len": _length,
    "max_num_seqs": _whole(1, MAX_REQUESTS),
    "max_num_queued_reqs": _whole(1, MAX_REQUESTS),
    "max_num_queued_tokens": _length,
    "long_prompt_tokens": _length,
    "long_prompt_share": _share,
    "long_queue_share": _queue_share,
    "tokenizer": Path,
    "max_body": parse_bytes,
    "api_key": _text,
    "host": _text,
    "port": _whole(1, 65535),
    "control_port": _whole(0, 65535),
    "control_dir": Path,
    "limits_file": Path,
    "shutdown_timeout": _real(0, MAX_SECONDS, f"seconds from 0 to {MAX_SECONDS}"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError("arguments", message, "flags as --help lists them")


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m plimsoll_engine.gate",
        description="Admits requests to a vLLM server by limits that move while it serves.",
        allow_abbrev=False,
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-model-len", metavar="N", help="the ceiling (the upstream's own)")
    limits.add_argument("--min-model-len", metavar="N", help="no limit is set below it (1)")
    limits.add_argument("--max-num-seqs", metavar="N", help="sequences upstream at once (256)")
    limits.add_argument(
        "--max-num-queued-reqs", metavar="N", help="waiting sequences before 429 (1024)"
    )
    limits.add_argument(
        "--max-num-queued-tokens", metavar="N", help="their prompt tokens before 429 (unbounded)"
    )
    limits.add_argument(
        "--long-prompt-tokens", metavar="N", help="prompts of more tokens are long (off)"
    )
    limits.add_argument(
        "--long-prompt-share", metavar="X", help="share of the upstream's KV cache for them (1)"
    )
    limits.add_argument(
        "--long-queue-share",
        metavar="X",
        help="share of it that those that wait may come to before 429 (unbounded)",
    )
    limits.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json, to count texts here")
    limits.add_argument("--max-body", metavar="BYTES", help="of one request (32Mi)")

    server = parser.add_argument_group("server and control")
    server.add_argument("--upstream", metavar="URL", help="vLLM, e.g. http://127.0.0.1:8001")
    server.add_argument("--host", help="address of the HTTP API (0.0.0.0)")
    server.add_argument("--port", metavar="N", help="port of the HTTP API (8000)")
    server.add_argument(
        "--api-key", metavar="KEY", help="vLLM's, asked of clients too (or PLIMSOLL_API_KEY)"
    )
    server.add_argument("--control-port", metavar="N", help="gRPC EngineControl; 0: off (8002)")
    server.add_argument(
        "--control-dir", metavar="DIR", help="tls.crt, tls.key and token of the control channel"
    )
    server.add_argument("--limits-file", metavar="FILE", help="limits in force, read at start")
    server.add_argument(
        "--shutdown-timeout", metavar="SECONDS", help="time to finish requests on SIGTERM (30)"
    )
    return parser
