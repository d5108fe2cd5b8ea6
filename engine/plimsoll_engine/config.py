"""The engine's settings: command line and environment in, one frozen EngineConfig out.

Flags are vLLM's names and forms. A bad value raises ConfigError, which names the flag, the value
and what is allowed; nothing is clamped in silence. This module reads no file, knows no model and
no device: what only the loaded model can tell (its longest length, whether the pool fits) is
checked by ``memory``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from plimsoll_engine.limits import MAX_LENGTH, MAX_QUEUE_SHARE
from plimsoll_engine.pod_group import PodGroup
from plimsoll_engine.termination import EngineFailure, FailureClass, Phase

Value = TypeVar("Value")
Default = TypeVar("Default")
Member = TypeVar("Member", bound=StrEnum)

_SHOWN_CHARACTERS = 200
# Far above what any device or model has, and far below what any integer of a library holds.
MAX_BYTES = 1 << 60
MAX_BATCHED_TOKENS = 1 << 24
MAX_REQUESTS = 1 << 20
MAX_RANKS = 128
MAX_BLOCK_SIZE = 256
MAX_SECONDS = 86400
# Each is a handful of time series.
MAX_API_KEYS = 100
# Of --api-key, and of requests without a right one.
RESERVED_KEY_NAMES = ("default", "unknown")
_KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_KEY = re.compile(r"[!-~]{1,512}")
_NO_KEYS: dict[str, str] = {}


class DeviceType(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class DType(StrEnum):
    """AUTO is the model's own dtype on CUDA and float32 on CPU."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class CacheDType(StrEnum):
    """Of keys and values in the cache. AUTO is the dtype in which the model computes."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FP8_E4M3 = "fp8_e4m3"


class LoadFormat(StrEnum):
    """DUMMY draws the weights at random, for benchmarks; only the model's configuration is read."""

    AUTO = "auto"
    DUMMY = "dummy"


class ConfigError(ValueError):
    """One setting that cannot be used.

    Attributes:
        field: the flag or environment variable, as the user writes it.
        value: what was given.
        allowed: what would have been accepted, in words.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        shown = _shorten(str(value))
        super().__init__(f"{field}: {shown!r} is not allowed; expected {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed

    def to_failure(self) -> EngineFailure:
        return EngineFailure(
            FailureClass.INVALID_CONFIGURATION,
            Phase.CONFIGURATION,
            str(self),
            figures={
                "field": self.field,
                "value": _shorten(str(self.value)),
                "allowed": self.allowed,
            },
        )


def _shorten(text: str) -> str:
    """The termination message has room for some 4000 bytes in all."""
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


@dataclass(frozen=True)
class EngineConfig:
    """Attribute names are the flags' with underscores. Sizes in bytes, lengths in tokens."""

    model: str
    revision: str | None = None
    # Never empty: the first one is the label model_name of every metric.
    served_model_name: tuple[str, ...] = ()
    device: DeviceType = DeviceType.AUTO
    # None: what the device, the cgroup and PLIMSOLL_MEMORY_LIMIT give.
    device_memory: int | None = None
    dtype: DType = DType.AUTO
    kv_cache_dtype: CacheDType = CacheDType.AUTO
    load_format: LoadFormat = LoadFormat.AUTO
    tensor_parallel_size: int = 1
    block_size: int = 16
    gpu_memory_utilization: float = 0.90
    # None: the largest that fits, at most the model's own.
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    # No step is recorded and replayed. On the CPU none ever is.
    enforce_eager: bool = False
    # Sequences in the decode steps that are recorded; None: by max_cudagraph_capture_size.
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    # None: max_num_seqs, at most 512.
    max_cudagraph_capture_size: int | None = None
    watermark: float = 0.0
    # None: no prompt is long.
    long_prompt_tokens: int | None = None
    long_prompt_share: float = 1.0
    # None: long prompts that wait have no bound of their own.
    long_queue_share: float | None = None
    enable_prefix_caching: bool = True
    max_num_queued_reqs: int = 1024
    # None: no bound but the one above.
    max_num_queued_tokens: int | None = None
    api_key: str | None = field(default=None, repr=False)
    # PLIMSOLL_API_KEYS: (name, key).
    api_keys: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    api_keys_file: Path | None = None
    # Beside vLLM's two flags of the same names: whether usage tells of cached tokens, and whether
    # streams tell usage unasked.
    enable_prompt_tokens_details: bool = True
    enable_force_include_usage: bool = False
    host: str = "0.0.0.0"
    port: int = 8000
    # 0: no control channel.
    control_port: int = 8001
    # None: the control port listens on the loopback address, without TLS.
    control_dir: Path | None = None
    limits_file: Path | None = None
    shutdown_timeout: float = 30.0
    seed: int = 0
    # PLIMSOLL_MEMORY_LIMIT: the container's limits.memory, by the downward API.
    memory_limit: int | None = None
    # POD_NAME, for log lines.
    pod_name: str | None = None
    # LeaderWorkerSet's variables, when the ranks are in several pods.
    pods: PodGroup | None = None

    def __post_init__(self) -> None:
        if not self.served_model_name:
            object.__setattr__(self, "served_model_name", (self.model,))


def parse_args(argv: Sequence[str], environ: Mapping[str, str]) -> EngineConfig:
    """Reads flags (without the program's name) and environment.

    Raises ConfigError. ``--help`` and ``--version`` print and raise SystemExit(0).
    """
    given, unknown = _build_parser().parse_known_args(list(argv))
    if unknown:
        raise ConfigError("arguments", " ".join(unknown), "only the flags that --help lists")
    if given.model is None:
        raise ConfigError("--model", "", "a folder, a .gguf file or a Hugging Face name org/name")
    flags = _Flags(given, environ)
    max_num_batched_tokens = flags.read(
        "max_num_batched_tokens", _positive_int(MAX_BATCHED_TOKENS), 2048
    )
    config = EngineConfig(
        model=flags.read("model", _text, ""),
        revision=flags.read("revision", _text, None),
        served_model_name=flags.read("served_model_name", _names, ()),
        device=flags.read("device", _member_of(DeviceType), DeviceType.AUTO),
        device_memory=flags.read("device_memory", parse_bytes, None),
        dtype=flags.read("dtype", _member_of(DType), DType.AUTO),
        kv_cache_dtype=flags.read("kv_cache_dtype", _member_of(CacheDType), CacheDType.AUTO),
        load_format=flags.read("load_format", _member_of(LoadFormat), LoadFormat.AUTO),
        tensor_parallel_size=flags.read("tensor_parallel_size", _positive_int(MAX_RANKS), 1),
        block_size=flags.read("block_size", _block_size, 16),
        gpu_memory_utilization=flags.read("gpu_memory_utilization", _share, 0.90),
        max_model_len=flags.read("max_model_len", parse_length, None),
        max_num_seqs=flags.read(
            "max_num_seqs", _positive_int(MAX_REQUESTS), min(256, max_num_batched_tokens)
        ),
        max_num_batched_tokens=max_num_batched_tokens,
        enforce_eager=flags.read("enforce_eager", bool, False),
        cudagraph_capture_sizes=flags.read("cudagraph_capture_sizes", _sizes, None),
        max_cudagraph_capture_size=flags.read(
            "max_cudagraph_capture_size", _positive_int(MAX_REQUESTS), None
        ),
        watermark=flags.read("watermark", _watermark, 0.0),
        long_prompt_tokens=flags.read("long_prompt_tokens", _positive_int(MAX_LENGTH), None),
        long_prompt_share=flags.read("long_prompt_share", _share, 1.0),
        long_queue_share=flags.read("long_queue_share", _queue_share, None),
        enable_prefix_caching=flags.read("enable_prefix_caching", bool, True),
        max_num_queued_reqs=flags.read("max_num_queued_reqs", _positive_int(MAX_REQUESTS), 1024),
        max_num_queued_tokens=flags.read("max_num_queued_tokens", _positive_int(MAX_LENGTH), None),
        api_key=flags.read("api_key", _text, None, variable="PLIMSOLL_API_KEY", secret=True),
        api_keys=tuple(
            flags.read(
                None, parse_api_keys, _NO_KEYS, variable="PLIMSOLL_API_KEYS", secret=True
            ).items()
        ),
        api_keys_file=flags.read("api_keys_file", Path, None),
        enable_prompt_tokens_details=flags.read("enable_prompt_tokens_details", bool, True),
        enable_force_include_usage=flags.read("enable_force_include_usage", bool, False),
        host=flags.read("host", _text, "0.0.0.0"),
        port=flags.read("port", _port, 8000),
        control_port=flags.read("control_port", _port_or_off, 8001),
        control_dir=flags.read("control_dir", Path, None),
        limits_file=flags.read("limits_file", Path, None),
        shutdown_timeout=flags.read("shutdown_timeout", _seconds, 30.0),
        seed=flags.read("seed", _seed, 0),
        memory_limit=flags.read(None, parse_bytes, None, variable="PLIMSOLL_MEMORY_LIMIT"),
        pod_name=flags.read(None, _text, None, variable="POD_NAME"),
        pods=_read_pods(flags),
    )
    _check_together(config)
    return config


def parse_length(text: str) -> int | None:
    """``8192``, ``8k`` (8000), ``8K`` (8192), ``25.6k``; ``auto`` is None. Raises ValueError."""
    if text == "auto":
        return None
    tokens = _scaled(text, {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2})
    if tokens is None or not 1 <= tokens <= MAX_LENGTH:
        raise ValueError(
            f"a number of tokens from 1 to {MAX_LENGTH}, such as 8192, 8k or 8K, or auto"
        )
    return tokens


def parse_bytes(text: str) -> int:
    """``1073741824``, ``1G`` (10^9), ``1Gi`` (2^30), as Kubernetes writes them.

    Raises ValueError.
    """
    decimal = {unit: 1000**power for power, unit in enumerate(["", "k", "M", "G", "T"])}
    binary = {unit: 1024**power for power, unit in enumerate(["Ki", "Mi", "Gi", "Ti"], start=1)}
    size = _scaled(text, decimal | binary)
    if size is None or not 1 <= size <= MAX_BYTES:
        raise ValueError(
            "a number of bytes from 1 to 2^60, plain or with k, M, G, T, Ki, Mi, Gi or Ti"
        )
    return size


def parse_api_keys(text: str) -> dict[str, str]:
    """Lines ``name=key``; empty ones and those that begin with # count for nothing.

    Raises ValueError, which names the line and never the key.
    """
    keys: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        name, equals, key = line.strip().partition("=")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if not equals or not _KEY_NAME.fullmatch(name) or name in RESERVED_KEY_NAMES:
            raise ValueError(
                "lines name=key, each name of 1 to 63 letters, digits, '-', '_' or '.', and not "
                f"{' or '.join(RESERVED_KEY_NAMES)} (line {number})"
            )
        if not _KEY.fullmatch(key):
            raise ValueError(f"keys of 1 to 512 visible ASCII characters (line {number})")
        if name in keys or key in keys.values():
            raise ValueError(f"names and keys that differ from each other (line {number})")
        keys[name] = key
    if not 1 <= len(keys) <= MAX_API_KEYS:
        raise ValueError(f"1 to {MAX_API_KEYS} lines name=key")
    return keys


def _read_pods(flags: _Flags) -> PodGroup | None:
    """None where LeaderWorkerSet says nothing, or that the group has one pod."""
    size = flags.read(None, _positive_int(MAX_RANKS), 1, variable="LWS_GROUP_SIZE")
    if size == 1:
        return None
    leader = flags.read(None, _text, None, variable="LWS_LEADER_ADDRESS")
    index = flags.read(None, _index_below(size), None, variable="LWS_WORKER_INDEX")
    token = flags.read(None, _text, None, variable="PLIMSOLL_GROUP_TOKEN", secret=True)
    for name, value in (("LWS_LEADER_ADDRESS", leader), ("LWS_WORKER_INDEX", index)):
        if value is None:
            raise ConfigError(name, "", f"to be set, as LWS_GROUP_SIZE ({size}) is")
    if token is None:
        raise ConfigError(
            "PLIMSOLL_GROUP_TOKEN", "", "a secret that all pods of the group share, from a Secret"
        )
    assert leader is not None
    assert index is not None
    return PodGroup(leader, size, index, flags.read("group_port", _group_port, 8002), token)


def _index_below(size: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) >= size:
            raise ValueError(f"a number from 0 to {size - 1}, below LWS_GROUP_SIZE")
        return int(text)

    return read


def _group_port(text: str) -> int:
    port = _port(text)
    if port > 65534:
        raise ValueError("a port from 1 to 65534: the one after it is used as well")
    return port


def _check_together(config: EngineConfig) -> None:
    if config.pods is not None and config.tensor_parallel_size % config.pods.size:
        raise ConfigError(
            "--tensor-parallel-size",
            config.tensor_parallel_size,
            f"a multiple of LWS_GROUP_SIZE ({config.pods.size}): each pod holds as many ranks",
        )
    if config.max_num_seqs > config.max_num_batched_tokens:
        raise ConfigError(
            "--max-num-seqs",
            config.max_num_seqs,
            f"at most --max-num-batched-tokens ({config.max_num_batched_tokens}): every running "
            "request takes at least one token of a step",
        )
    largest = max(config.cudagraph_capture_sizes or (config.max_cudagraph_capture_size or 1,))
    if largest > config.max_num_seqs:
        flag = "--cudagraph-capture-sizes"
        if config.cudagraph_capture_sizes is None:
            flag = "--max-cudagraph-capture-size"
        raise ConfigError(
            flag,
            largest,
            f"at most --max-num-seqs ({config.max_num_seqs}): no step decodes more requests",
        )
    if config.cudagraph_capture_sizes and config.max_cudagraph_capture_size:
        raise ConfigError(
            "--max-cudagraph-capture-size",
            config.max_cudagraph_capture_size,
            "nothing beside --cudagraph-capture-sizes, which lists every size",
        )
    if config.port == config.control_port:
        raise ConfigError("--control-port", config.control_port, "another port than --port's")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError("arguments", message, "flags as --help lists them")


class _Flags:
    """Turns texts into values, and a ValueError of a reader into a ConfigError with its name."""

    def __init__(self, given: argparse.Namespace, environ: Mapping[str, str]) -> None:
        self._given = given
        self._environ = environ

    def read(
        self,
        flag: str | None,
        reader: Callable[[Any], Value],
        default: Default,
        *,
        variable: str | None = None,
        secret: bool = False,
    ) -> Value | Default:
        """The flag wins over the variable; an empty variable counts as unset. The value of a
        ``secret`` is not repeated in the error."""
        text: str | list[str] | None = getattr(self._given, flag) if flag else None
        name = f"--{flag.replace('_', '-')}" if flag else ""
        if text is None and variable and self._environ.get(variable):
            text, name = self._environ[variable], variable
        if text is None:
            return default
        try:
            return reader(text)
        except ValueError as error:
            raise ConfigError(name, "***" if secret else text, str(error)) from None


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m plimsoll_engine",
        description="Serves one model over the OpenAI API, with limits that move while it serves.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=version("plimsoll"))
    # Every value stays a text here: the readers of parse_args name what is wrong with it.
    model = parser.add_argument_group("model")
    model.add_argument("--model", metavar="PATH|NAME", help="folder, .gguf file or org/name")
    model.add_argument("--revision", help="branch, tag or commit of a Hugging Face name")
    model.add_argument(
        "--served-model-name",
        metavar="NAME",
        nargs="+",
        action="extend",
        help="names the API answers to; the first labels the metrics (default: --model)",
    )
    model.add_argument("--dtype", help="auto (the model's; float32 on CPU), float32, ...")
    model.add_argument(
        "--kv-cache-dtype",
        help="auto, or the dtype that the model computes in: others cannot be stored yet (auto)",
    )
    model.add_argument(
        "--load-format", help="auto, or dummy: random weights, for benchmarks (auto)"
    )
    model.add_argument("--seed", metavar="N", help="of sampling without a seed of its own (0)")

    memory = parser.add_argument_group("device and memory")
    memory.add_argument("--device", help="auto, cpu or cuda")
    memory.add_argument("--device-memory", metavar="BYTES", help="use at most this much, e.g. 2Gi")
    memory.add_argument("--tensor-parallel-size", metavar="N", help="ranks per model (1)")
    memory.add_argument(
        "--group-port",
        metavar="PORT",
        help="of the leader of a LeaderWorkerSet group; the next one is used as well (8002)",
    )
    memory.add_argument("--block-size", metavar="N", help="tokens per KV block (16)")
    memory.add_argument(
        "--gpu-memory-utilization",
        metavar="X",
        help="share of the device's memory that model, activations and KV may fill (0.90)",
    )
    memory.add_argument(
        "--max-model-len",
        metavar="N",
        help="ceiling of prompt plus output: 8192, 8k=8000, 8K=8192, auto (the largest that fits)",
    )

    batch = parser.add_argument_group("batch and queue")
    batch.add_argument("--max-num-seqs", metavar="N", help="requests running at once (256)")
    batch.add_argument("--max-num-batched-tokens", metavar="N", help="tokens per step (2048)")
    batch.add_argument(
        "--enforce-eager",
        action=argparse.BooleanOptionalAction,
        help="record no decode step as a CUDA graph (off; on the CPU none ever is)",
    )
    batch.add_argument(
        "--cudagraph-capture-sizes",
        metavar="N",
        nargs="+",
        help="requests in the decode steps that are recorded (1 2 4 8, then multiples of 16)",
    )
    batch.add_argument(
        "--max-cudagraph-capture-size",
        metavar="N",
        help="the largest of those, when they are not listed (--max-num-seqs, at most 512)",
    )
    batch.add_argument(
        "--watermark", metavar="X", help="share of the pool kept free at admission (0)"
    )
    batch.add_argument(
        "--long-prompt-tokens",
        metavar="N",
        help="prompts of more tokens are long: shorter ones may overtake them (off)",
    )
    batch.add_argument(
        "--long-prompt-share",
        metavar="X",
        help="share of the pool up to which long prompts are admitted beside each other (1)",
    )
    batch.add_argument(
        "--long-queue-share",
        metavar="X",
        help="share of the pool that long prompts may come to while they wait: 429 beyond (off)",
    )
    batch.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="reuse the KV blocks of a prompt's known start (on)",
    )
    batch.add_argument(
        "--max-num-queued-reqs", metavar="N", help="waiting requests before 429 (1024)"
    )
    batch.add_argument(
        "--max-num-queued-tokens", metavar="N", help="tokens of waiting requests before 429 (off)"
    )

    server = parser.add_argument_group("server and control")
    server.add_argument("--host", help="address of the HTTP API (0.0.0.0)")
    server.add_argument("--port", metavar="N", help="port of the HTTP API (8000)")
    server.add_argument("--api-key", metavar="KEY", help="bearer token (or PLIMSOLL_API_KEY)")
    server.add_argument(
        "--api-keys-file",
        metavar="FILE",
        help="lines name=key: use is counted by name (or PLIMSOLL_API_KEYS with such lines)",
    )
    server.add_argument(
        "--enable-prompt-tokens-details",
        action=argparse.BooleanOptionalAction,
        help="tell the cached tokens of a prompt in usage (on)",
    )
    server.add_argument(
        "--enable-force-include-usage",
        action=argparse.BooleanOptionalAction,
        help="end every stream with its usage, asked for or not (off)",
    )
    server.add_argument("--control-port", metavar="N", help="gRPC EngineControl; 0: off (8001)")
    server.add_argument(
        "--control-dir", metavar="DIR", help="tls.crt, tls.key and token of the control channel"
    )
    server.add_argument("--limits-file", metavar="FILE", help="limits in force, read at start")
    server.add_argument(
        "--shutdown-timeout", metavar="SECONDS", help="time to finish requests on SIGTERM (30)"
    )
    return parser


def _scaled(text: str, units: Mapping[str, int]) -> int | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-zA-Z]*)", text)
    if match is None or match[2] not in units:
        return None
    size = Decimal(match[1]) * units[match[2]]
    # Thousands of digits are no size, and Python would refuse to print them.
    return int(size) if size <= MAX_BYTES else None


def _text(text: str) -> str:
    if not text:
        raise ValueError("a text that is not empty")
    try:
        text.encode()
    # Bytes that are no UTF-8 come as lone surrogates, which no answer, label or log can carry.
    except UnicodeEncodeError:
        raise ValueError("a text in UTF-8") from None
    return text


def _names(texts: list[str]) -> tuple[str, ...]:
    return tuple(_text(text) for text in texts)


def _member_of(enum: type[Member]) -> Callable[[str], Member]:
    def read(text: str) -> Member:
        try:
            return enum(text)
        except ValueError:
            raise ValueError(f"one of {', '.join(enum)}") from None

    return read


def _integer(text: str, low: int, high: int, allowed: str) -> int:
    # Twenty digits: Python refuses to read some thousands of them with an error of its own.
    if not re.fullmatch(r"\d{1,20}", text) or not low <= int(text) <= high:
        raise ValueError(allowed)
    return int(text)


def _positive_int(high: int) -> Callable[[str], int]:
    return lambda text: _integer(text, 1, high, f"a whole number from 1 to {high}")


def _sizes(texts: list[str]) -> tuple[int, ...]:
    read = _positive_int(MAX_REQUESTS)
    return tuple(sorted({read(text) for text in texts}))


def _block_size(text: str) -> int:
    allowed = f"a multiple of 16 from 16 to {MAX_BLOCK_SIZE}"
    size = _integer(text, 16, MAX_BLOCK_SIZE, allowed)
    if size % 16:
        raise ValueError(allowed)
    return size


def _port(text: str) -> int:
    return _integer(text, 1, 65535, "a port from 1 to 65535")


def _port_or_off(text: str) -> int:
    return _integer(text, 0, 65535, "a port from 1 to 65535, or 0 for none")


def _seed(text: str) -> int:
    return _integer(text, 0, 2**63 - 1, "a whole number from 0 to 2^63 - 1")


def _number(text: str, allowed: str, accepts: Callable[[float], bool]) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(allowed) from None
    if not accepts(number):
        raise ValueError(allowed)
    return number


def _share(text: str) -> float:
    return _number(text, "a number above 0, at most 1", lambda x: 0 < x <= 1)


def _queue_share(text: str) -> float:
    allowed = f"a number above 0, at most {MAX_QUEUE_SHARE}"
    return _number(text, allowed, lambda x: 0 < x <= MAX_QUEUE_SHARE)


def _watermark(text: str) -> float:
    return _number(text, "a number from 0, below 1", lambda x: 0 <= x < 1)


def _seconds(text: str) -> float:
    # Beyond some 292 years the clocks below Python overflow; nobody means more than a day.
    return _number(text, f"seconds from 0 to {MAX_SECONDS}", lambda x: 0 <= x <= MAX_SECONDS)
