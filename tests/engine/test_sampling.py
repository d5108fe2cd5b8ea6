"""Choosing tokens: exact arg-max, every knob, and draws that depend on seed and position alone."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plimsoll_engine.logprobs import build_logprob_table
from plimsoll_engine.sampling import RowRequest, Sampler
from plimsoll_engine.sampling_params import SamplingParams
from support.row_sampler import apply_constraints, draw, seeded_draw

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=1, temperature=1.0)
# Probabilities 0.5, 0.3, 0.15, 0.05 of tokens 3, 1, 0, 2.
LOGITS = torch.tensor([0.15, 0.3, 0.05, 0.5]).log()


def choose_all(logits: torch.Tensor, requests: list[RowRequest], seed: int = 0) -> list[int]:
    tokens: list[int] = Sampler(seed).choose(logits, requests).tolist()
    return tokens


def choose(
    params: SamplingParams, output: tuple[int, ...] = (), prompt: tuple[int, ...] = ()
) -> int:
    request = RowRequest(params, output, prompt)
    return choose_all(LOGITS[None].clone(), [request])[0]


def draw_many(params: SamplingParams, draws: int = 4000) -> dict[int, float]:
    """Shares of the tokens drawn."""
    logits = LOGITS.expand(draws, -1).clone()
    chosen = choose_all(logits, [RowRequest(params)] * draws)
    return {token: count / draws for token, count in Counter(chosen).items()}


def test_greedy_is_the_argmax_and_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 5.0]])
    assert choose_all(logits, [RowRequest(GREEDY)] * 2) == [1, 0]


def test_greedy_tells_float32_neighbours_apart() -> None:
    logits = torch.full((1, 50), 7.0)
    logits[0, 31] = torch.nextafter(torch.tensor(7.0), torch.tensor(8.0))
    assert choose_all(logits, [RowRequest(GREEDY)]) == [31]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SAMPLED, {3: 0.5, 1: 0.3, 0: 0.15, 2: 0.05}),
        (replace(SAMPLED, top_k=2), {3: 5 / 8, 1: 3 / 8}),
        (replace(SAMPLED, top_k=100), {3: 0.5, 1: 0.3, 0: 0.15, 2: 0.05}),
        # The smallest set that reaches the share: 0.5 alone does, 0.51 needs the second.
        (replace(SAMPLED, top_p=0.49), {3: 1.0}),
        (replace(SAMPLED, top_p=0.51), {3: 5 / 8, 1: 3 / 8}),
        (replace(SAMPLED, min_p=0.5), {3: 5 / 8, 1: 3 / 8}),
        # top_p is a share of what top_k left.
        (replace(SAMPLED, top_k=2, top_p=0.6), {3: 1.0}),
        (replace(SAMPLED, top_k=1), {3: 1.0}),
        (replace(SAMPLED, temperature=0.5), {3: 0.685, 1: 0.247, 0: 0.0616, 2: 0.0068}),
        (replace(SAMPLED, logit_bias=((2, 100.0),)), {2: 1.0}),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams, expected: dict[int, float]) -> None:
    shares = draw_many(params)
    assert shares.keys() <= expected.keys()
    for token, share in expected.items():
        assert shares.get(token, 0.0) == pytest.approx(share, abs=0.03)


def test_very_small_temperature_is_greedy_and_finite() -> None:
    assert draw_many(replace(SAMPLED, temperature=1e-5), draws=20) == {3: 1.0}


EXTREMES = st.sampled_from([1e-300, 1e-38, 1e-5, 0.01, 1.0, 100.0, 1e38, 1e300])
VOCABULARY = 12


@settings(deadline=None)
@given(
    logits=st.lists(
        st.floats(width=32, allow_nan=True, allow_infinity=True),
        min_size=VOCABULARY,
        max_size=VOCABULARY,
    ),
    # One token at least is allowed.
    forbidden=st.sets(st.integers(0, VOCABULARY - 1), max_size=VOCABULARY - 1),
    temperature=EXTREMES,
    repetition_penalty=st.sampled_from([0.01, 0.5, 1.0, 2.0, 100.0]),
    top_p=st.sampled_from([1.0, 0.5, 1e-300]),
    top_k=st.sampled_from([None, 1, 5, VOCABULARY]),
    min_p=st.sampled_from([0.0, 0.5, 1.0]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 2.0]),
    bias=st.sampled_from([-100.0, 0.0, 100.0]),
    output=st.lists(st.integers(0, VOCABULARY - 1), max_size=4),
    seed=st.integers(0, 9),
)
def test_a_forbidden_token_is_never_drawn_whatever_the_values(
    logits: list[float],
    forbidden: set[int],
    temperature: float,
    repetition_penalty: float,
    top_p: float,
    top_k: int | None,
    min_p: float,
    presence_penalty: float,
    bias: float,
    output: list[int],
    seed: int,
) -> None:
    # All as likely as a logit of -inf: nothing tells the forbidden ones from the others.
    assume(any(logit > -1e30 for place, logit in enumerate(logits) if place not in forbidden))
    params = SamplingParams(
        max_tokens=9,
        min_tokens=9,
        stop_token_ids=frozenset(forbidden),
        temperature=temperature,
        repetition_penalty=repetition_penalty,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        presence_penalty=presence_penalty,
        logit_bias=tuple((token, bias) for token in sorted(forbidden)),
        seed=seed,
    )
    request = RowRequest(params, tuple(output), (0, VOCABULARY - 1))
    [token] = choose_all(torch.tensor([logits]), [request])
    assert token in set(range(VOCABULARY)) - forbidden


@pytest.mark.parametrize("temperature", [1e-38, 1e-300, 0.01])
@pytest.mark.parametrize("scale", [1.0, 1e36])
def test_nearly_no_temperature_is_the_argmax(temperature: float, scale: float) -> None:
    logits = torch.tensor([[3.0, 9.0, 5.0, -2.0]]) * scale
    params = replace(SAMPLED, temperature=temperature)
    assert choose_all(logits, [RowRequest(params)]) == [1]


def test_ends_are_masked_until_min_tokens() -> None:
    params = replace(
        GREEDY, min_tokens=2, eos_token_ids=frozenset({3}), stop_token_ids=frozenset({1})
    )
    assert choose(params, output=()) == 0
    assert choose(params, output=(0,)) == 0
    assert choose(params, output=(0, 0)) == 3


@pytest.mark.parametrize(
    ("params", "output", "prompt", "expected"),
    [
        (replace(GREEDY, presence_penalty=1.0), (3,), (), 1),
        # Counted once however often it came, and not for the prompt.
        (replace(GREEDY, presence_penalty=0.4), (3, 3, 3), (), 3),
        (replace(GREEDY, presence_penalty=1.0), (), (3,), 3),
        (replace(GREEDY, frequency_penalty=0.4), (3, 3), (), 1),
        (replace(GREEDY, frequency_penalty=0.4), (3,), (), 3),
        # Logits below zero are multiplied.
        (replace(GREEDY, repetition_penalty=2.0), (3,), (), 1),
        (replace(GREEDY, repetition_penalty=2.0), (), (3,), 1),
        (replace(GREEDY, logit_bias=((0, 2.0), (2, 1.0))), (), (), 0),
    ],
)
def test_penalties_and_bias(
    params: SamplingParams, output: tuple[int, ...], prompt: tuple[int, ...], expected: int
) -> None:
    assert choose(params, output, prompt) == expected


def test_repetition_penalty_divides_logits_above_zero() -> None:
    logits = torch.tensor([[4.0, 3.0, 1.0]])
    params = replace(GREEDY, repetition_penalty=2.0)
    assert choose_all(logits, [RowRequest(params, (0,))]) == [1]
    assert logits.tolist() == [[2.0, 3.0, 1.0]]


def test_seeded_draw_depends_on_seed_and_position_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(1000, generator=generator)
    request = RowRequest(replace(SAMPLED, seed=11), (5, 6))
    others = [RowRequest(SAMPLED)] * 3
    alone = choose_all(row[None].clone(), [request], seed=1)[0]
    beside = choose_all(
        torch.stack([*torch.randn(3, 1000, generator=generator), row]), [*others, request], seed=2
    )[-1]
    assert alone == beside
    later = [
        choose_all(row[None].clone(), [RowRequest(request.params, (0,) * position)], seed=1)[0]
        for position in range(8)
    ]
    assert len(set(later)) > 4


def test_unseeded_draws_come_from_the_engines_seed() -> None:
    def series(seed: int) -> list[int]:
        sampler = Sampler(seed)
        return [int(sampler.choose(torch.zeros(1, 1000), [RowRequest(SAMPLED)])) for _ in range(5)]

    assert series(1) == series(1)
    assert series(1) != series(2)


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(9),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7, 1e-300]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-300]),
    top_k=st.sampled_from([None, 1, 3, 50, 200, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, 1.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    seed=st.none() | st.integers(0, 99),
    min_tokens=st.sampled_from([0, 4]),
    eos_token_ids=st.frozensets(st.integers(0, 199), max_size=3),
    logit_bias=st.dictionaries(st.integers(0, 199), st.floats(-100, 100, width=32), max_size=3).map(
        lambda bias: tuple(bias.items())
    ),
)
IDS = st.lists(st.integers(0, 199), max_size=6).map(tuple)
ROWS = st.lists(st.builds(RowRequest, PARAMS, IDS, IDS), min_size=1, max_size=8)


@settings(deadline=None, max_examples=200)
@given(
    requests=ROWS,
    logits_seed=st.integers(0, 999),
    rounded=st.booleans(),
    nucleus=st.sampled_from([1, 20, 1024]),
)
def test_rows_together_are_each_row_by_the_definition(
    requests: list[RowRequest], logits_seed: int, rounded: bool, nucleus: int
) -> None:
    """Bit by bit, also where logits that were bfloat16 are equal to each other, and however many of
    the most likely tokens are looked at first."""
    generator = torch.Generator().manual_seed(logits_seed)
    logits = torch.randn(len(requests), 200, generator=generator) * 4
    if rounded:
        logits = logits.bfloat16().float()
    draws = random.Random(7)
    expected = []
    for row, request in zip(logits.clone(), requests, strict=True):
        apply_constraints(row, request)
        uniform = 0.0
        if not request.params.greedy:
            uniform = draws.random() if request.params.seed is None else seeded_draw(request)
        token = row.argmax() if request.params.greedy else draw(row, request.params, uniform)
        expected.append(int(token))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plimsoll_engine.sampling._NUCLEUS", nucleus)
        assert choose_all(logits, requests, seed=7) == expected


def test_the_bound_on_rows_drawn_at_once_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(3))
    params = [
        replace(SAMPLED, seed=row, top_k=(None, 5, 9)[row % 3], top_p=(1.0, 0.8)[row % 2])
        for row in range(40)
    ]
    requests = [RowRequest(own) for own in params]
    together = choose_all(logits.clone(), requests)
    monkeypatch.setattr("plimsoll_engine.sampling._DRAW_BYTES", {"cpu": 3 * 4 * 300})
    assert choose_all(logits.clone(), requests) == together


def test_logprobs_have_the_token_first_then_the_top_with_ranks() -> None:
    logits = torch.stack([LOGITS, LOGITS + 3.0])
    table = build_logprob_table(logits, torch.tensor([2, 3]), 2).to_host()
    first, second = table.entries([2, 0])
    assert [(entry.token_id, entry.rank) for entry in first] == [(2, 4), (3, 1), (1, 2)]
    assert [entry.logprob for entry in first] == pytest.approx(
        torch.tensor([0.05, 0.5, 0.3]).log().tolist(), abs=1e-6
    )
    assert [(entry.token_id, entry.rank) for entry in second] == [(3, 1)]


def test_logprobs_asked_for_more_than_there_are_give_all() -> None:
    [entries] = build_logprob_table(LOGITS[None], torch.tensor([0]), 20).entries([20])
    assert len(entries) == 1 + len(LOGITS)
