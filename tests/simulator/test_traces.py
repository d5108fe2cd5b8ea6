"""Traces as users have them, and what is said of those that are none."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from plimsoll_simulator.traces import Arrival, TraceError, read_trace


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_times_start_at_the_first_arrival_in_order(tmp_path: Path) -> None:
    text = "t_s,input_tokens,output_tokens\n12.5,10,3\n10,20,0\n"
    trace = read_trace(write(tmp_path / "mine.csv", text))
    assert trace.name == "mine"
    assert trace.arrivals == (Arrival(0.0, 20, 1), Arrival(2.5, 10, 3))


def test_azure_columns_with_seven_digits_and_gzip(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv.gz"
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    path.write_bytes(gzip.compress(text.encode()))
    first, second = read_trace(path).arrivals
    assert (first.input_tokens, first.output_tokens) == (374, 44)
    assert second.time == pytest.approx(4.314579, abs=1e-5)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("1.0,ten,3", "line 3: input_tokens is 'ten'; expected a whole number of tokens"),
        ("1.0,0,3", "line 3: input_tokens is '0'; expected 1 or more"),
        ("1.0,10,-1", "line 3: output_tokens is '-1'; expected 0 or more"),
        ("1.0,10", "line 3: output_tokens is None; expected a whole number of tokens"),
        ("noon,10,3", "line 3: t_s is 'noon'; expected seconds"),
        ("nan,10,3", "line 3: t_s is 'nan'; expected seconds"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, expected: str) -> None:
    path = write(tmp_path / "bad.csv", f"t_s,input_tokens,output_tokens\n0,1,1\n{row}\n")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value) == f"{path}: {expected}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "columns are missing; expected t_s,input_tokens,output_tokens or TIMESTAMP,"),
        ("a,b\n1,2\n", "columns are a, b; expected"),
        ("t_s,input_tokens,output_tokens\n", "has no requests"),
    ],
)
def test_a_file_that_is_no_trace(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(TraceError, match=expected):
        read_trace(write(tmp_path / "other.csv", text))


def test_what_is_not_gzip_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="Not a gzipped file"):
        read_trace(write(tmp_path / "plain.csv.gz", "t_s,input_tokens,output_tokens\n0,1,1\n"))
