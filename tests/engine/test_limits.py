from __future__ import annotations

import json
from pathlib import Path

import pytest

from plimsoll_engine.limits import (
    LimitBounds,
    Limits,
    LimitsFileError,
    find_violation,
    merge_limits,
    read_limits_file,
)

BOUNDS = LimitBounds(ceiling=4096, max_num_seqs=64, max_num_batched_tokens=2048)


@pytest.mark.parametrize(
    "limits",
    [
        Limits(),
        Limits(1, 0.05, 1, 1, 0.0),
        Limits(4096, 1.0, 64, 2048, 0.99),
        Limits(long_prompt_tokens=1, long_prompt_share=0.01),
        Limits(long_prompt_tokens=2**31 - 1, long_prompt_share=1.0),
        Limits(long_queue_share=0.01),
        Limits(long_queue_share=1000.0),
    ],
)
def test_the_bounds_themselves_are_allowed(limits: Limits) -> None:
    assert find_violation(limits, BOUNDS) is None


@pytest.mark.parametrize(
    ("limits", "names"),
    [
        (Limits(max_model_len=4097), ["max_model_len", "4097", "1 to 4096", "ceiling"]),
        (Limits(max_model_len=0), ["max_model_len", "0", "1 to 4096"]),
        (Limits(gpu_memory_utilization=0.0), ["gpu_memory_utilization", "0.0", "above 0"]),
        (Limits(gpu_memory_utilization=1.01), ["gpu_memory_utilization", "1.01", "at most 1"]),
        (Limits(gpu_memory_utilization=float("nan")), ["gpu_memory_utilization", "nan"]),
        (Limits(max_num_seqs=65), ["max_num_seqs", "65", "1 to 64", "at start"]),
        (Limits(max_num_batched_tokens=2049), ["max_num_batched_tokens", "2049", "1 to 2048"]),
        (Limits(watermark=1.0), ["watermark", "1.0", "below 1"]),
        (Limits(long_prompt_tokens=0), ["long_prompt_tokens", "0", "1 to 2147483647"]),
        (Limits(long_prompt_share=0.0), ["long_prompt_share", "0.0", "above 0, at most 1"]),
        (Limits(long_prompt_share=1.5), ["long_prompt_share", "1.5", "above 0, at most 1"]),
        (Limits(long_prompt_share=float("nan")), ["long_prompt_share", "nan"]),
        (Limits(long_queue_share=0.0), ["long_queue_share", "0.0", "above 0, at most 1000"]),
        (Limits(long_queue_share=1001.0), ["long_queue_share", "1001.0", "at most 1000"]),
        (Limits(long_queue_share=float("nan")), ["long_queue_share", "nan"]),
        (
            Limits(max_num_seqs=10, max_num_batched_tokens=9),
            ["max_num_seqs", "10", "max_num_batched_tokens (9)"],
        ),
    ],
)
def test_a_violation_names_field_value_and_what_is_allowed(
    limits: Limits, names: list[str]
) -> None:
    violation = find_violation(limits, BOUNDS)
    assert violation is not None
    assert all(name in violation for name in names), violation


def test_an_absent_limit_stays_as_it_is() -> None:
    current = Limits(4096, 0.9, 64, 2048, 0.0)
    assert merge_limits(current, Limits(max_model_len=1024)) == Limits(1024, 0.9, 64, 2048, 0.0)
    assert merge_limits(current, Limits(watermark=0.0)) == current


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_a_missing_or_empty_file_says_nothing(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "limits.json"
    if content is not None:
        path.write_text(content)
    assert read_limits_file(path) is None


def test_the_operators_file_is_read_and_what_is_new_in_it_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "limits.json"
    limits = {
        "maxModelLen": 2048,
        "gpuMemoryUtilization": 1,
        "watermark": None,
        "longPromptTokens": 8192,
        "longPromptShare": 0.7,
        "longQueueShare": 0.5,
        "newer": "x",
    }
    path.write_text(json.dumps({"revision": 7, "limits": limits, "also": "newer"}))
    assert read_limits_file(path) == (
        7,
        Limits(
            max_model_len=2048,
            gpu_memory_utilization=1,
            long_prompt_tokens=8192,
            long_prompt_share=0.7,
            long_queue_share=0.5,
        ),
    )


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not JSON"),
        ("[]", "expected"),
        ('{"revision": 1}', "expected"),
        ('{"limits": {}}', "revision: None is not a number"),
        ('{"revision": 1.5, "limits": {}}', "revision: 1.5 is not a whole number"),
        ('{"revision": 1, "limits": {"maxModelLen": "8k"}}', "maxModelLen: '8k'"),
        ('{"revision": 1, "limits": {"maxModelLen": 8.5}}', "whole number"),
        ('{"revision": 1, "limits": {"watermark": true}}', "watermark: True"),
        ('{"revision": 1, "limits": {"longPromptTokens": 8.5}}', "longPromptTokens: 8.5"),
    ],
)
def test_an_unusable_file_is_an_error_that_names_it(
    tmp_path: Path, content: str, complaint: str
) -> None:
    path = tmp_path / "limits.json"
    path.write_text(content)
    with pytest.raises(LimitsFileError, match=complaint) as caught:
        read_limits_file(path)
    assert str(path) in str(caught.value)


def test_a_folder_in_place_of_the_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LimitsFileError):
        read_limits_file(tmp_path)
