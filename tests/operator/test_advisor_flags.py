"""vLLM's settings out of a container's words."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll_operator.advisor.flags import VllmFlags, mentions_vllm, read_flags, read_whole

SCRIPT = """\
set -e; python prefetch.py --max-model-len 1 && \\
  exec vllm serve "org/m" \\
    --max-model-len=${LEN} --gpu-memory-utilization 0.95 \\
    -tp 4 --compilation-config '{"level": 3}' | tee /tmp/log --max-num-seqs 9
sleep 1 --block-size 3
"""


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        pytest.param({}, VllmFlags(), id="nothing said"),
        pytest.param(
            {"args": ["--model", "org/m", "--max-model-len=8192", "--port", "9000"]},
            VllmFlags(model="org/m", max_model_len=8192, port=9000),
            id="arguments of an image's entry point",
        ),
        pytest.param(
            {
                "command": ["python3", "-m", "vllm.entrypoints.openai.api_server"],
                "args": ["--max_num_seqs=64", "--max-num-batched-tokens", "4096"],
            },
            VllmFlags(max_num_seqs=64, max_num_batched_tokens=4096),
            id="underscores",
        ),
        pytest.param(
            {"command": ["/usr/bin/vllm", "serve", "org/m", "--tensor-parallel-size", "2"]},
            VllmFlags(model="org/m", tensor_parallel_size=2),
            id="vllm serve",
        ),
        pytest.param(
            {"command": ["sh", "-c", SCRIPT], "env": [{"name": "LEN", "value": "16k"}]},
            VllmFlags(
                model="org/m",
                max_model_len=16_000,
                gpu_memory_utilization=0.95,
                tensor_parallel_size=4,
            ),
            id="a script, whose other programs are not vLLM",
        ),
        pytest.param(
            {"args": ["--max-model-len=$(LEN)"], "env": [{"name": "LEN", "value": "4K"}]},
            VllmFlags(max_model_len=4096),
            id="a variable of the pod",
        ),
        pytest.param(
            {"args": ["--max-num-seqs=1", "--max-num-seqs=2"]},
            VllmFlags(max_num_seqs=2),
            id="the last word counts",
        ),
        pytest.param(
            {"args": ["--enforce-eager", "--kv-cache-memory-bytes", "8G", "--block-size=32"]},
            VllmFlags(kv_cache_memory_bytes=8 * 1024**3, block_size=32),
            id="a switch takes no value",
        ),
    ],
)
def test_what_is_said_is_read(container: dict[str, Any], expected: VllmFlags) -> None:
    assert read_flags(container) == expected


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--max-model-len=auto"], "--max-model-len is auto, which is no number here"),
        (["--max-model-len", "$(LEN)"], "--max-model-len is $(LEN), which is no number here"),
        (["--gpu-memory-utilization=1.5"], "--gpu-memory-utilization is 1.5"),
        (["--max-num-seqs"], "--max-num-seqs is without a value"),
        (["--max-num-seqs", "8", "--max-num-seqs=x"], "--max-num-seqs is x"),
        (["--config=/etc/vllm.yaml"], "the file of --config, which is not read"),
    ],
)
def test_what_cannot_be_read_is_unknown_and_said_so(args: list[str], said: str) -> None:
    found = read_flags({"args": args})
    assert (found.max_model_len, found.gpu_memory_utilization, found.max_num_seqs) == (None,) * 3
    (message,) = found.unread
    assert said in message


def test_a_script_that_is_none_is_unknown() -> None:
    assert read_flags({"command": ["sh", "-c", "vllm serve 'open --max-num-seqs 3"]}) == VllmFlags()


@pytest.mark.parametrize(
    ("text", "value"),
    [("8192", 8192), ("8k", 8000), ("8K", 8192), ("25.6k", 25_600), ("1M", 1024**2)]
    + [(text, None) for text in ("auto", "-1", "0", "", "1.5K", "k", "1e400", "9" * 30)],
)
def test_whole_numbers_as_vllm_writes_them(text: str, value: int | None) -> None:
    assert read_whole(text) == value


def test_a_container_with_vllm_in_its_words_is_vllms() -> None:
    assert mentions_vllm({"image": "vllm/vllm-openai:v0.19.0"})
    assert mentions_vllm({"image": "registry/own:1", "command": ["sh", "-c", "vllm serve m"]})
    assert not mentions_vllm({"image": "envoy:1", "args": ["--max-model-len=1"]})
