import os
import re

import pytest

from plimsoll_engine.config import (
    ConfigError,
    DeviceType,
    DType,
    EngineConfig,
    parse_args,
    parse_bytes,
    parse_length,
)
from plimsoll_engine.termination import MAX_MESSAGE_BYTES, FailureClass


def parse(*argv: str, **environ: str) -> EngineConfig:
    return parse_args(["--model", "org/name", *argv], environ)


def test_the_model_alone_gives_the_documented_defaults() -> None:
    assert parse() == EngineConfig(
        model="org/name",
        served_model_name=("org/name",),
        block_size=16,
        gpu_memory_utilization=0.90,
        max_model_len=None,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_num_queued_reqs=1024,
        port=8000,
        control_port=8001,
        shutdown_timeout=30.0,
    )


def test_every_flag_reaches_its_attribute() -> None:
    config = parse(
        *("--revision", "main", "--served-model-name", "a", "b", "--served-model-name", "c"),
        *("--device", "cpu", "--device-memory", "1.5Gi", "--dtype", "bfloat16"),
        *("--tensor-parallel-size", "3", "--block-size", "32", "--gpu-memory-utilization", "0.5"),
        *("--max-model-len", "8K", "--max-num-seqs", "8", "--max-num-batched-tokens", "512"),
        *("--watermark", "0.02", "--max-num-queued-reqs", "9", "--api-key", "secret"),
        *("--long-prompt-tokens", "8192", "--long-prompt-share", "0.7"),
        *("--long-queue-share", "0.5"),
        *("--max-num-queued-tokens", "9000"),
        *("--host", "::", "--port", "80", "--control-port", "0", "--control-dir", "/control"),
        *("--limits-file", "/limits/limits.json", "--shutdown-timeout", "1.5", "--seed", "7"),
        PLIMSOLL_MEMORY_LIMIT="629145600",
        POD_NAME="assistant-0",
    )
    assert config.revision == "main"
    assert config.served_model_name == ("a", "b", "c")
    assert config.device is DeviceType.CPU
    assert config.device_memory == 3 << 29
    assert config.dtype is DType.BFLOAT16
    assert config.tensor_parallel_size == 3
    assert config.block_size == 32
    assert config.gpu_memory_utilization == 0.5
    assert config.max_model_len == 8192
    assert config.max_num_seqs == 8
    assert config.max_num_batched_tokens == 512
    assert config.watermark == 0.02
    assert (config.long_prompt_tokens, config.long_prompt_share) == (8192, 0.7)
    assert config.long_queue_share == 0.5
    assert config.max_num_queued_reqs == 9
    assert config.max_num_queued_tokens == 9000
    assert config.api_key == "secret"
    assert (config.host, config.port, config.control_port) == ("::", 80, 0)
    assert str(config.control_dir) == "/control"
    assert str(config.limits_file) == "/limits/limits.json"
    assert config.shutdown_timeout == 1.5
    assert config.seed == 7
    assert config.memory_limit == 600 << 20
    assert config.pod_name == "assistant-0"


@pytest.mark.parametrize(
    ("argv", "field", "value", "allowed"),
    [
        (("--device", "tpu"), "--device", "tpu", "one of auto, cpu, cuda"),
        (("--dtype", "int8"), "--dtype", "int8", "one of auto, float32, bfloat16, float16"),
        (("--kv-cache-dtype", "fp8"), "--kv-cache-dtype", "fp8", "float16, fp8_e4m3"),
        (("--load-format", "gguf"), "--load-format", "gguf", "one of auto, dummy"),
        (("--device-memory", "2GB"), "--device-memory", "2GB", "Gi"),
        (("--device-memory", "0"), "--device-memory", "0", "from 1"),
        (("--tensor-parallel-size", "0"), "--tensor-parallel-size", "0", "from 1"),
        (("--block-size", "24"), "--block-size", "24", "multiple of 16"),
        (("--block-size", "0"), "--block-size", "0", "multiple of 16"),
        (("--gpu-memory-utilization", "0"), "--gpu-memory-utilization", "0", "at most 1"),
        (("--gpu-memory-utilization", "90"), "--gpu-memory-utilization", "90", "at most 1"),
        (("--gpu-memory-utilization", "nan"), "--gpu-memory-utilization", "nan", "at most 1"),
        (("--max-model-len", "8kb"), "--max-model-len", "8kb", "8192, 8k or 8K, or auto"),
        (("--max-model-len", "-5"), "--max-model-len", "-5", "auto"),
        (("--max-model-len", "0"), "--max-model-len", "0", "from 1"),
        (("--max-num-seqs", "1.5"), "--max-num-seqs", "1.5", "whole number"),
        (("--max-num-seqs", "4096"), "--max-num-seqs", "4096", "--max-num-batched-tokens (2048)"),
        (
            ("--cudagraph-capture-sizes", "4", "0"),
            "--cudagraph-capture-sizes",
            "['4', '0']",
            "from 1",
        ),
        (("--cudagraph-capture-sizes", "9", "300"), "--cudagraph-capture-sizes", "300", "(256)"),
        (("--max-cudagraph-capture-size", "300"), "--max-cudagraph-capture-size", "300", "(256)"),
        (
            ("--max-cudagraph-capture-size", "8", "--cudagraph-capture-sizes", "4"),
            "--max-cudagraph-capture-size",
            "8",
            "--cudagraph-capture-sizes",
        ),
        (("--max-num-batched-tokens", "x"), "--max-num-batched-tokens", "x", "whole number"),
        (("--watermark", "1"), "--watermark", "1", "below 1"),
        (("--long-prompt-tokens", "8k"), "--long-prompt-tokens", "8k", "whole number from 1"),
        (("--long-prompt-share", "0"), "--long-prompt-share", "0", "above 0, at most 1"),
        (("--long-queue-share", "0"), "--long-queue-share", "0", "above 0, at most 1000"),
        (("--long-queue-share", "1e9"), "--long-queue-share", "1e9", "above 0, at most 1000"),
        (("--max-num-queued-tokens", "0"), "--max-num-queued-tokens", "0", "from 1"),
        (("--max-num-queued-reqs", "0"), "--max-num-queued-reqs", "0", "from 1"),
        (("--port", "65536"), "--port", "65536", "65535"),
        (("--control-port", "8000"), "--control-port", "8000", "--port"),
        (("--shutdown-timeout", "inf"), "--shutdown-timeout", "inf", "seconds from 0"),
        (("--shutdown-timeout", "9.3e9"), "--shutdown-timeout", "9.3e9", "from 0 to 86400"),
        (("--shutdown-timeout", "nan"), "--shutdown-timeout", "nan", "from 0 to 86400"),
        (("--block-size", "1048576"), "--block-size", "1048576", "from 16 to 256"),
        (("--seed", "-1"), "--seed", "-1", "from 0"),
        (("--served-model-name", ""), "--served-model-name", "['']", "not empty"),
        (("--max-modellen", "9"), "arguments", "--max-modellen 9", "--help"),
        (("--port",), "arguments", "argument --port: expected one argument", "--help"),
    ],
)
def test_a_bad_value_names_field_value_and_what_is_allowed(
    argv: tuple[str, ...], field: str, value: str, allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*argv)
    assert caught.value.field == field
    assert str(caught.value.value) == value
    assert allowed in caught.value.allowed
    failure = caught.value.to_failure()
    assert failure.failure_class is FailureClass.INVALID_CONFIGURATION
    assert failure.exit_status == 2
    assert "\n" not in str(caught.value)


def test_sizes_of_recorded_steps_are_read_in_any_order() -> None:
    config = parse("--cudagraph-capture-sizes", "8", "1", "8", "--enforce-eager")
    assert (config.cudagraph_capture_sizes, config.enforce_eager) == ((1, 8), True)
    assert (parse().cudagraph_capture_sizes, parse().enforce_eager) == (None, False)


@pytest.mark.parametrize("digits", ["1000000000000000000", "9" * 40, "9" * 5000])
@pytest.mark.parametrize(
    "flag",
    [
        "--tensor-parallel-size",
        "--block-size",
        "--max-model-len",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--max-num-queued-reqs",
        "--shutdown-timeout",
        "--port",
        "--control-port",
    ],
)
def test_no_number_is_too_large_to_be_refused(flag: str, digits: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(flag, digits)
    assert caught.value.field == flag
    assert re.search(r"from \d+ to \d+", caught.value.allowed)
    assert len(caught.value.to_failure().to_json()) < MAX_MESSAGE_BYTES


@pytest.mark.parametrize("variable", ["--device-memory", "PLIMSOLL_MEMORY_LIMIT"])
@pytest.mark.parametrize("size", ["9" * 5000, "9" * 5000 + "Ti", "1048577Ti"])
def test_no_size_is_too_large_to_be_refused(variable: str, size: str) -> None:
    argv, environ = ((variable, size), {}) if variable.startswith("-") else ((), {variable: size})
    with pytest.raises(ConfigError, match=variable) as caught:
        parse(*argv, **environ)
    assert "from 1 to 2^60" in caught.value.allowed
    assert len(caught.value.to_failure().to_json()) < MAX_MESSAGE_BYTES


@pytest.mark.parametrize("flag", ["--served-model-name", "--api-key", "--host", "--revision"])
def test_bytes_that_are_no_utf8_are_refused(flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(flag, os.fsdecode(b"a\xff"))
    assert caught.value.field == flag
    assert "UTF-8" in caught.value.allowed


def test_a_bad_api_key_is_not_repeated() -> None:
    secret = os.fsdecode(b"hidden\xff")
    with pytest.raises(ConfigError, match="PLIMSOLL_API_KEY") as caught:
        parse(PLIMSOLL_API_KEY=secret)
    assert "hidden" not in caught.value.to_failure().to_json()


def test_a_negative_value_is_an_argument_and_not_a_flag() -> None:
    with pytest.raises(ConfigError, match="--max-model-len"):
        parse("--max-model-len=-1")


def test_a_missing_model_is_named() -> None:
    with pytest.raises(ConfigError, match="--model"):
        parse_args([], {})


def test_a_bad_variable_is_named_as_one() -> None:
    with pytest.raises(ConfigError, match="PLIMSOLL_MEMORY_LIMIT: 'lots'"):
        parse(PLIMSOLL_MEMORY_LIMIT="lots")


def test_the_flag_wins_over_the_variable_and_an_empty_variable_is_unset() -> None:
    assert parse("--api-key", "flag", PLIMSOLL_API_KEY="variable").api_key == "flag"
    assert parse(PLIMSOLL_API_KEY="variable").api_key == "variable"
    assert parse(PLIMSOLL_API_KEY="").api_key is None


def test_the_api_key_does_not_show_in_logs_of_the_configuration() -> None:
    assert "hidden" not in repr(parse("--api-key", "hidden"))


def test_a_small_token_budget_narrows_the_default_batch() -> None:
    assert parse("--max-num-batched-tokens", "64").max_num_seqs == 64


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("8192", 8192), ("8k", 8000), ("8K", 8192), ("25.6k", 25600), ("1M", 1 << 20), ("auto", None)],
)
def test_lengths_are_read_as_vllm_reads_them(text: str, tokens: int | None) -> None:
    assert parse_length(text) == tokens


@pytest.mark.parametrize(
    ("text", "size"),
    [("1024", 1024), ("1k", 1000), ("600Mi", 600 << 20), ("0.5Gi", 1 << 29), ("2G", 2 * 10**9)],
)
def test_sizes_are_read_as_kubernetes_writes_them(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), True),
        (("--enable-prefix-caching",), True),
        (("--no-enable-prefix-caching",), False),
    ],
)
def test_the_prefix_cache_has_a_flag_for_on_and_one_for_off(
    flags: tuple[str, ...], expected: bool
) -> None:
    assert parse_args(("--model", "m", *flags), {}).enable_prefix_caching is expected
