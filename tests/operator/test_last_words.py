"""What vLLM's last words mean, in the words of several versions."""

from __future__ import annotations

import re

import pytest

from plimsoll_operator.tuning import last_words
from plimsoll_operator.tuning.last_words import (
    read_estimated_length,
    read_last_line,
    read_last_words,
)
from plimsoll_operator.tuning.values import FailureClass

BUSY = FailureClass.GPU_BUSY_AT_START
CACHE = FailureClass.KV_TOO_SMALL_FOR_MAX_LEN
SETTING = FailureClass.INVALID_CONFIGURATION
MODEL = FailureClass.MODEL_LOAD_FAILED
AT_START = FailureClass.CUDA_OOM_AT_START

SAID = [
    # 0.9.1, 0.19 and 0.32
    (
        (
            "ValueError: Free memory on device (31.44/47.38 GiB) on startup is less than desired GPU memory "
            "utilization (0.95, 45.01 GiB). Decrease GPU memory utilization"
        ),
        BUSY,
    ),
    (
        (
            "ValueError: Free memory on device cuda:0 (111.99/139.8 GiB) on startup is less than desired GPU "
            "memory utilization (0.95, 132.81 GiB)."
        ),
        BUSY,
    ),
    (
        (
            "AssertionError: Error in memory profiling. Initial free memory 10 GiB, current free memory 11 "
            "GiB. This happens when other processes sharing the same container release GPU memory"
        ),
        BUSY,
    ),
    (
        (
            "ValueError: Available memory on node 0 (20.8/23.5 GiB) on startup is less than desired CPU "
            "memory utilization (1.0, 23.5 GiB)."
        ),
        AT_START,
    ),
    (
        (
            "ValueError: To serve at least one request with the models's max seq len (8192), (0.18 GiB KV "
            "cache is needed, which is larger than the available KV cache memory (0.02 GiB)."
        ),
        CACHE,
    ),
    (
        (
            "ValueError: To serve at least one request with the model's max seq len (8192), 0.18 GiB KV cache "
            "is needed"
        ),
        CACHE,
    ),
    (
        (
            "ValueError: No available memory for the cache blocks. Try increasing "
            "`gpu_memory_utilization` when initializing the engine."
        ),
        CACHE,
    ),
    ("ValueError: Cannot auto-fit max_model_len: not enough GPU memory available to serve", CACHE),
    (
        (
            "ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that "
            "can be stored in KV cache (41392). Try increasing `gpu_memory_utilization`"
        ),
        CACHE,
    ),
    (
        (
            "Value error, User-specified max_model_len (99999) is greater than the derived max_model_len "
            "(max_position_embeddings=8192 or model_max_length=None in model's config.json)."
        ),
        SETTING,
    ),
    ("vllm: error: unrecognized arguments: --disable-log-requests", SETTING),
    ("vllm serve: error: argument --dtype: invalid choice: 'int3'", SETTING),
    (
        "ValueError: Total number of attention heads (9) must be divisible by tensor parallel size (2).",
        SETTING,
    ),
    (
        "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0.",
        SETTING,
    ),
    ("pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig", SETTING),
    (
        "RuntimeError: Insufficient space in /dev/shm for shared-memory allocation: 160 MiB required",
        SETTING,
    ),
    ("RuntimeError: Cannot find any model weights with `/model/empty`", MODEL),
    (
        (
            "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or "
            "'namespace/repo_name': '/model/none'."
        ),
        MODEL,
    ),
    ("ValueError: Invalid repository ID or local directory specified: '/model/none'.", MODEL),
    (
        "OSError: org/none is not a local folder and is not a valid model identifier listed on the hub",
        MODEL,
    ),
    ("OSError: /model/x does not appear to have a file named config.json.", MODEL),
    ("huggingface_hub.errors.GatedRepoError: 401 Client Error.", MODEL),
    ("safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge", MODEL),
    ("ValueError: There is no module or parameter named 'lm_head.bias' in LlamaForCausalLM", MODEL),
    ("ValueError: Model architectures ['NewForCausalLM'] are not supported for now.", MODEL),
    (
        "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization",
        FailureClass.MODEL_TOO_LARGE,
    ),
    ("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", BUSY),
    ("torch.AcceleratorError: CUDA error: no kernel image is available for execution", SETTING),
    (
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        FailureClass.ENGINE_DEAD,
    ),
    ("RuntimeError: CUDA error: device-side assert triggered", FailureClass.ENGINE_DEAD),
    (
        "NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python, MMU Fault",
        FailureClass.ENGINE_DEAD,
    ),
    ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus", FailureClass.GPU_FAULT),
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered", FailureClass.GPU_FAULT),
    ("torch.AcceleratorError: CUDA error: unspecified launch failure", FailureClass.GPU_FAULT),
    ("RuntimeError: HIP error: unknown error", FailureClass.GPU_FAULT),
    (
        "NCCL WARN Call to connect failed\nRuntimeError: NCCL error: unhandled system error",
        FailureClass.COLLECTIVE_FAILURE,
    ),
    ("TimeoutError: RPC call to execute_model timed out.", FailureClass.COLLECTIVE_FAILURE),
    (
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests.",
        AT_START,
    ),
    (
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.\n"
            "RuntimeError: Engine core initialization failed. See root cause above."
        ),
        AT_START,
    ),
    (
        (
            "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 72 MiB.\n"
            "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
        ),
        FailureClass.CUDA_OOM_AT_RUNTIME,
    ),
]


@pytest.mark.parametrize(("words", "failure_class"), SAID)
def test_words_have_a_class(words: str, failure_class: FailureClass) -> None:
    found = read_last_words(words)
    assert found is not None
    assert found.failure_class is failure_class
    assert found.line in words


def test_every_row_of_the_table_is_said_by_somebody() -> None:
    unsaid = [
        pattern
        for pattern, _, _ in last_words._ROWS
        if not any(re.search(pattern, words) for words, _ in SAID)
    ]
    assert unsaid == []


def test_other_words_have_none() -> None:
    assert read_last_words("") is None
    assert read_last_words("RuntimeError: Engine core initialization failed.") is None


def test_the_line_that_tells_is_shown_without_the_logs_prefix() -> None:
    log = (
        "(APIServer pid=1) INFO 12-02 18:19:22 [api_server.py:7] starting\n"
        "(EngineCore pid=9) ERROR 12-02 18:19:24 [core.py:1510] ValueError: No available memory for the "
        "cache blocks.\n"
        "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above."
    )
    found = read_last_words(log)
    assert found is not None
    assert found.line == "ValueError: No available memory for the cache blocks."


def test_an_echo_is_not_the_cause() -> None:
    assert (
        read_last_line("OSError: no\nRuntimeError: failed. See root cause above.") == "OSError: no"
    )
    echo = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
    assert read_last_line(f"(Worker pid=2) KeyError: 3\n{echo}\n{echo}") == "KeyError: 3"
    assert read_last_line(echo) == echo
    assert read_last_line("") == ""


def test_both_estimates_are_read() -> None:
    assert read_estimated_length("the estimated maximum model length is 41392. Try") == 41392
    assert read_estimated_length("tokens that can be stored in KV cache (512).") == 512
    assert read_estimated_length("nothing") is None
