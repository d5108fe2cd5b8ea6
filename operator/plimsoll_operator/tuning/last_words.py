"""What the last words of an engine mean: fragments of vLLM's, torch's and NCCL's errors -> a class.

In: the termination message of a container, or the end of its log. Out: the class with the line that
says so, or None. The table is read from above: what tells most stands first. Each row names versions of vLLM that
say it; "all" is 0.8.5 to 0.32.0. A fragment is a regular expression and names no figure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from plimsoll_operator.tuning.values import FailureClass

_ROWS: tuple[tuple[str, FailureClass, str], ...] = (
    # Memory that others hold: vllm/v1/worker/utils.py, gpu_worker.py.
    (r"Free memory on device .*less than desired GPU memory", FailureClass.GPU_BUSY_AT_START, "all"),
    (r"Error in memory profiling", FailureClass.GPU_BUSY_AT_START, "all"),
    (r"CUDA-capable device\(s\) is/are busy or unavailable", FailureClass.GPU_BUSY_AT_START, "all"),
    # On CPU nobody else is in the container: cpu_worker.py.
    (r"Available memory on node .*less than desired CPU memory",
     FailureClass.CUDA_OOM_AT_START, "0.19 on"),
    # The cache: kv_cache_utils.py; "models's" until 0.20, the last row is the engine before V1.
    (r"To serve at least one request with the models?'?s? max seq len",
     FailureClass.KV_TOO_SMALL_FOR_MAX_LEN, "all"),
    (r"No available memory for the cache blocks", FailureClass.KV_TOO_SMALL_FOR_MAX_LEN, "all"),
    (r"Cannot auto-fit max_model_len", FailureClass.KV_TOO_SMALL_FOR_MAX_LEN, "0.14 on"),
    (r"max seq len \(\d+\) is larger than the maximum number of tokens that can be stored",
     FailureClass.KV_TOO_SMALL_FOR_MAX_LEN, "to 0.10"),
    # Settings: config/*.py, and argparse.
    (r"User-specified max_model_len .* is greater than the derived",
     FailureClass.INVALID_CONFIGURATION, "all"),
    (r"unrecognized arguments:|: error: argument ", FailureClass.INVALID_CONFIGURATION, "all"),
    (r"must be divisible by tensor parallel size", FailureClass.INVALID_CONFIGURATION, "all"),
    (r"validation errors? for \w*(Config|Args)\b", FailureClass.INVALID_CONFIGURATION, "0.10 on"),
    (r"only supported on GPUs with compute capability",
     FailureClass.INVALID_CONFIGURATION, "all"),
    (r"Insufficient space in /dev/shm", FailureClass.INVALID_CONFIGURATION, "0.32"),
    # The model: model_loader/, transformers and huggingface_hub.
    (r"Failed to load model - not enough GPU memory", FailureClass.MODEL_TOO_LARGE, "0.9 on"),
    (r"Cannot find any model weights with", FailureClass.MODEL_LOAD_FAILED, "all"),
    (r"Repo id must be in the form|Invalid repository ID or local directory",
     FailureClass.MODEL_LOAD_FAILED, "all"),
    (r"is not a local folder and is not a valid model identifier",
     FailureClass.MODEL_LOAD_FAILED, "all"),
    (r"does not appear to have a file named", FailureClass.MODEL_LOAD_FAILED, "all"),
    (r"(RepositoryNotFound|GatedRepo|RevisionNotFound|LocalEntryNotFound)Error",
     FailureClass.MODEL_LOAD_FAILED, "all"),
    (r"SafetensorError|There is no module or parameter named",
     FailureClass.MODEL_LOAD_FAILED, "all"),
    (r"Model architectures .* (are not supported|failed to be inspected)",
     FailureClass.MODEL_LOAD_FAILED, "all"),
    # The device and the ranks. A program's own mistake would follow it to the next device: the fault is
    # what is left. It takes the collectives with it, so it stands before them.
    (r"(CUDA|HIP) error: (no kernel image|invalid device ordinal)|CUDA driver version is insufficient",
     FailureClass.INVALID_CONFIGURATION, "all"),
    (r"\bXid \(.*?\): (13|31|32|43|45|68)\b", FailureClass.ENGINE_DEAD, "all"),
    (r"(CUDA|HIP) error: .*(illegal|misaligned|assert|invalid)", FailureClass.ENGINE_DEAD, "all"),
    (r"\bXid\b|uncorrectable ECC|(CUDA|HIP) error: (?!out of memory)", FailureClass.GPU_FAULT, "all"),
    (r"NCCL error|ncclUnhandled|ncclSystemError|ncclRemoteError|Watchdog caught collective",
     FailureClass.COLLECTIVE_FAILURE, "all"),
    (r"RPC call to \w+ timed out|gloo.*Connection (closed|reset) by peer",
     FailureClass.COLLECTIVE_FAILURE, "0.10 on"),
    # Memory, last: most of the above tell of it in their own words.
    (r"out of memory occurred when warming up sampler", FailureClass.CUDA_OOM_AT_START, "all"),
    (r"(CUDA|HIP) (error: )?out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
     FailureClass.CUDA_OOM_AT_RUNTIME, "all"),
)  # fmt: skip

# With one of these beside it, memory ran out before the server was up.
_STARTING = re.compile(
    r"profile_run|determine_available_memory|warming up|capture_model|load_model"
    r"|(EngineCore|WorkerProc) failed to start|(Engine core|WorkerProc) initialization failed"
)
_ESTIMATED_LENGTH = re.compile(
    r"estimated maximum model length is (\d+)|tokens that can be stored in KV cache \((\d+)\)"
)
# Process, level, time and place, as vLLM's log has them.
_PREFIX = re.compile(
    r"^(?:\([\w ]+pid=\d+\)\s*)?(?:(?:ERROR|WARNING|INFO) [\d-]+ [\d:]+ \[[^\]]*\]\s*)?"
)


# What vLLM's processes say when another of them has ended: never the cause.
_ECHO = re.compile(r"See (root cause |stack trace \()above|EngineDeadError")


@dataclass(frozen=True)
class LastWords:
    """``line`` is the one with the fragment, without what the log puts before it."""

    failure_class: FailureClass
    line: str


def read_last_words(message: str) -> LastWords | None:
    for pattern, failure_class, _ in _ROWS:
        if (found := re.search(pattern, message)) is None:
            continue
        if failure_class is FailureClass.CUDA_OOM_AT_RUNTIME and _STARTING.search(message):
            failure_class = FailureClass.CUDA_OOM_AT_START
        return LastWords(failure_class, _line_at(message, found.start()))
    return None


def read_last_line(message: str) -> str:
    """The last line that is no echo of another process's end; empty where nothing was said."""
    lines = message.strip().splitlines()
    telling = [line for line in lines if not _ECHO.search(line)]
    return _line_at((telling or lines or [""])[-1], 0)


def read_estimated_length(message: str) -> int | None:
    """The length, in tokens, that vLLM says would fit."""
    found = _ESTIMATED_LENGTH.search(message)
    return None if found is None else int(found[1] or found[2])


def _line_at(message: str, position: int) -> str:
    start = message.rfind("\n", 0, position) + 1
    return _PREFIX.sub("", message[start:].partition("\n")[0]).strip()
