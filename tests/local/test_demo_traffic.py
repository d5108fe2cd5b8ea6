"""The burst is a pure function of trace rows and a seed, of the shape that was asked for."""

import pytest

from plimsoll_local.demo.traffic import (
    DEMO_BURST,
    Kind,
    Stream,
    TraceRow,
    parse_trace,
    read_excerpt,
    shape_burst,
)

ROWS = tuple(TraceRow(at_s=at, prompt_tokens=p, output_tokens=o) for at, p, o in [
    (0.0, 100, 9), (1.0, 300, 7), (4.0, 200, 8), (4.5, 500, 1),
])  # fmt: skip


def test_a_row_of_the_trace_is_time_prompt_and_output() -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.6805900,396,109\n"
    )
    assert parse_trace(text) == (TraceRow(0.0, 374, 44), TraceRow(4.0, 396, 109))


def test_gaps_and_sizes_keep_their_proportions() -> None:
    stream = Stream(Kind.SHORT, 4, (10, 19), prompt_tokens=(64, 94), output_tokens=(1, 4))
    burst = shape_burst(ROWS, seed=1, streams=[stream])
    assert [arrival.at_s for arrival in burst] == [10, 12, 18, 19]
    assert [arrival.prompt_tokens for arrival in burst] == [64, 79, 72, 94]
    assert [arrival.output_tokens for arrival in burst] == [4, 3, 4, 1]
    assert [arrival.number for arrival in burst] == [1, 2, 3, 4]


def test_rows_with_one_time_arrive_together() -> None:
    rows = [TraceRow(3.0, 10, 1), TraceRow(3.0, 20, 2)]
    stream = Stream(Kind.LONG, 2, (5, 9), prompt_tokens=(1500, 3000), output_tokens=(16, 32))
    assert [arrival.at_s for arrival in shape_burst(rows, 1, [stream])] == [5, 5]


def test_a_single_request_takes_the_upper_bounds() -> None:
    stream = Stream(Kind.LONG, 1, (5, 9), prompt_tokens=(1500, 3000), output_tokens=(16, 32))
    (arrival,) = shape_burst(ROWS, 1, [stream])
    assert (arrival.at_s, arrival.prompt_tokens, arrival.output_tokens) == (5, 3000, 32)


def test_a_trace_that_is_too_short_is_refused() -> None:
    stream = Stream(Kind.SHORT, 5, (0, 1), prompt_tokens=(1, 2), output_tokens=(1, 2))
    with pytest.raises(ValueError, match="4 rows, the burst needs 5"):
        shape_burst(ROWS, 1, [stream])


def test_one_seed_makes_one_burst_and_another_seed_another() -> None:
    rows = read_excerpt()
    assert shape_burst(rows, 7) == shape_burst(rows, 7)
    assert shape_burst(rows, 7) != shape_burst(rows, 8)


@pytest.mark.parametrize("seed", range(20))
def test_the_demo_burst_has_the_promised_shape(seed: int) -> None:
    burst = shape_burst(read_excerpt(), seed)
    for stream in DEMO_BURST:
        own = [arrival for arrival in burst if arrival.kind is stream.kind]
        assert len(own) == stream.count
        prompts = [arrival.prompt_tokens for arrival in own]
        outputs = [arrival.output_tokens for arrival in own]
        assert (min(prompts), max(prompts)) == stream.prompt_tokens
        assert (min(outputs), max(outputs)) == stream.output_tokens
        assert (own[0].at_s, own[-1].at_s) == stream.span_s
    assert [arrival.at_s for arrival in burst] == sorted(arrival.at_s for arrival in burst)
