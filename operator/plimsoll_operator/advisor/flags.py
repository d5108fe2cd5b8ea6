"""What a container's words say of vLLM's settings.

In: one container of a pod (command, args, env). Out: :class:`VllmFlags`; what is not said, or cannot be
read, is None, and ``unread`` says why. vLLM's defaults are never filled in: they differ by version
and device. Knows words alone: no file (``--config``) and no Secret is looked into.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

# What may follow: the server's own words. Everything before them is another program's.
_SERVERS = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
_SHORT = {"-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size"}
_WHOLE = {
    "max-model-len": "max_model_len",
    "max-num-seqs": "max_num_seqs",
    "max-num-batched-tokens": "max_num_batched_tokens",
    "tensor-parallel-size": "tensor_parallel_size",
    "pipeline-parallel-size": "pipeline_parallel_size",
    "block-size": "block_size",
    "kv-cache-memory-bytes": "kv_cache_memory_bytes",
    "port": "port",
}
_SHARES = {"gpu-memory-utilization": "gpu_memory_utilization", "watermark": "watermark"}
_TEXTS = {"model": "model"}

# vLLM's own form of whole numbers: 1k is 1000, 1K is 1024.
_HUMAN = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKmMgGtT]?)")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")
_SHELL_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
_SEPARATORS = frozenset("();<>|&")


@dataclass(frozen=True)
class VllmFlags:
    """Lengths in tokens, sizes in bytes, shares as fractions of 1. None: not said."""

    model: str | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    watermark: float | None = None
    port: int | None = None
    unread: tuple[str, ...] = ()


def mentions_vllm(container: Mapping[str, Any]) -> bool:
    words = (*container.get("command", ()), *container.get("args", ()))
    return "vllm" in container.get("image", "") or any("vllm" in word for word in words)


def read_flags(container: Mapping[str, Any]) -> VllmFlags:
    found: dict[str, Any] = {}
    unread: dict[str, str] = {}
    words, serves = _server_words(container)
    if serves and words and not words[0].startswith("-"):
        # `vllm serve MODEL`
        found["model"] = words[0]
    for name, text in _flags(words):
        if name == "config":
            unread[name] = "settings may stand in the file of --config, which is not read"
        field = _WHOLE.get(name) or _SHARES.get(name) or _TEXTS.get(name)
        if field is None:
            continue
        value = _read(name, text)
        # The last word counts, also when it cannot be read.
        found[field] = value
        unread.pop(name, None)
        if value is None:
            unread[name] = f"--{name} is {text or 'without a value'}, which is no number here"
    return VllmFlags(**found, unread=tuple(unread.values()))


def _read(name: str, text: str) -> int | float | str | None:
    if name in _TEXTS:
        return text or None
    if name in _SHARES:
        try:
            share = float(text)
        except ValueError:
            return None
        return share if 0 <= share <= 1 else None
    return read_whole(text)


def read_whole(text: str) -> int | None:
    """``8192``, ``8k``, ``8K`` or ``25.6k``; None for anything else, ``auto`` included."""
    found = _HUMAN.fullmatch(text)
    if found is None:
        return None
    number, suffix = found.groups()
    base = 1024 if suffix.isupper() else 1000
    if "." in number and base == 1024:
        # Refused by vLLM as well.
        return None
    value = float(number) * base ** _POWERS[suffix.lower()]
    return int(value) if 0 < value < 2**53 else None


def _flags(words: list[str]) -> Iterator[tuple[str, str]]:
    """(name without dashes, value); underscores count as dashes, as vLLM has it."""
    for index, word in enumerate(words):
        if not word.startswith("-"):
            continue
        flag, equals, value = word.partition("=")
        name = _SHORT.get(flag, flag.lstrip("-").replace("_", "-"))
        if not equals and index + 1 < len(words) and not words[index + 1].startswith("--"):
            value = words[index + 1]
        yield name, value


def _server_words(container: Mapping[str, Any]) -> tuple[list[str], bool]:
    """The words after the server's name, or all of them where an image's entry point has the name; and
    whether that is `vllm serve`, as it is in vLLM's images."""
    environment = {
        each["name"]: each["value"]
        for each in container.get("env", ())
        if isinstance(each.get("value"), str)
    }
    words: list[str] = []
    for raw in (*container.get("command", ()), *container.get("args", ())):
        word = _VARIABLE.sub(lambda m: environment.get(m[1], m[0]), raw)
        if "vllm" in word and any(space in word for space in " \n\t"):
            words += _shell_words(word, environment)
        else:
            words.append(word)
    begin, serves = 0, "command" not in container
    for index, word in enumerate(words):
        served = word == "serve" and index > 0 and words[index - 1].rpartition("/")[2] == "vllm"
        if served or word in _SERVERS:
            begin, serves = index + 1, served
    end = next(
        (i for i in range(begin, len(words)) if words[i] and set(words[i]) <= _SEPARATORS),
        len(words),
    )
    return words[begin:end], serves


def _shell_words(script: str, environment: Mapping[str, str]) -> list[str]:
    """A script's words, its separators as words of their own; none for one that is no script."""
    script = script.replace("\\\n", " ").replace("\n", " ; ")
    lexer = shlex.shlex(script, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        words = list(lexer)
    except ValueError:
        return []
    return [_SHELL_VARIABLE.sub(lambda m: environment.get(m[1] or m[2], m[0]), w) for w in words]
