"""Chance, filters and log probabilities, against what can be worked out by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_apps.engine.protocol import AnswerError, SamplingParams
from serve_apps.engine.torch_engine.sampling import Sampler, logprobs_of, sample


def allowed(logits: list[float], params: SamplingParams) -> set[int]:
    """The tokens that may be chosen: temperature, then top_k, then top_p, in plain Python."""
    weights = [2.718281828459045 ** (logit / params.temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: -weights[token])
    order = order[: params.top_k or None]
    total = sum(weights[token] for token in order)
    kept, mass = set(), 0.0
    for token in order:
        if mass / total >= params.top_p:
            break
        kept.add(token)
        mass += weights[token]
    return kept


@settings(deadline=None)
@given(
    st.permutations([0.0, 0.7, 1.1, 1.9, 2.6, 3.2]),
    st.integers(0, 7),
    st.sampled_from([0.05, 0.33, 0.71, 0.97, 1.0]),
    st.sampled_from([0.3, 1.0, 2.0]),
)
def test_every_token_that_the_filters_allow_is_chosen_as_often_as_it_is_likely(
    logits: list[float], top_k: int, top_p: float, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=3)
    rows = 1500
    sampler = Sampler(params)
    counts = Counter(sample(torch.tensor(logits).expand(rows, -1), [sampler] * rows))
    may = allowed(logits, params)
    assert set(counts) <= may
    weights = {token: 2.718281828459045 ** (logits[token] / temperature) for token in may}
    total = sum(weights.values())
    for token, weight in weights.items():
        expected = weight / total
        # Six standard deviations of a share of so many draws.
        tolerance = 6 * (expected * (1 - expected) / rows) ** 0.5 + 2 / rows
        assert counts[token] / rows == pytest.approx(expected, abs=tolerance)


def test_top_p_that_reaches_beyond_the_first_candidates() -> None:
    logits = torch.zeros(1, 1000)  # all equally likely: 0.9 needs 900 of them
    sampler = Sampler(SamplingParams(top_p=0.9, seed=1))
    chosen = sample(logits.expand(4000, -1), [sampler] * 4000)
    assert 850 < len(set(chosen)) <= 900


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    params = [
        SamplingParams(seed=5),
        SamplingParams(seed=6, top_p=0.8),
        SamplingParams(temperature=0.0),
        SamplingParams(seed=-7, temperature=0.5, top_k=40),
        SamplingParams(),
        SamplingParams(top_k=3),
    ]

    def draw(rows: list[int]) -> dict[int, list[int]]:
        samplers = [Sampler(params[row]) for row in rows]
        drawn = [sample(logits[rows], samplers) for _ in range(20)]
        return {row: [step[at] for step in drawn] for at, row in enumerate(rows) if row < 4}

    together = draw([0, 1, 2, 3, 4, 5])
    for rows in ([0], [1], [2], [3], [3, 5, 1], [4, 0]):
        for row, tokens in draw(rows).items():
            assert tokens == together[row]


def test_without_a_seed_two_requests_differ() -> None:
    logits = torch.zeros(1, 1000)
    first, second = Sampler(SamplingParams()), Sampler(SamplingParams())
    assert [sample(logits, [first]) for _ in range(8)] != [sample(logits, [second]) for _ in range(8)]


@pytest.mark.parametrize("temperature", [0.0, 1e-9])
def test_no_temperature_is_the_likeliest_token(temperature: float) -> None:
    logits = torch.tensor([[0.1, 3.0, 2.999], [5.0, 3.0, 4.0]])
    sampler = Sampler(SamplingParams(temperature=temperature, top_k=2))
    assert sample(logits, [sampler, sampler]) == [1, 0]


NAN, INF = float("nan"), float("inf")
BAD_ROWS = {
    "the model's NaN": ([1.0, NAN, 2.0, 0.0], SamplingParams(), False),
    "the model's infinity": ([1.0, INF, 2.0, 0.0], SamplingParams(), False),
    "no logit at all": ([-INF] * 4, SamplingParams(), False),
    "a bias without end": ([1.0, 3.0, 2.0, 0.0], SamplingParams(logit_bias=((1, INF),)), True),
    "a bias that is no number": ([1.0, 3.0, 2.0, 0.0], SamplingParams(logit_bias=((1, NAN),)), True),
    "a penalty that overflows": ([1.0, 3.0, 2.0, 0.0], SamplingParams(repetition_penalty=1e-300), True),
    "biases against all": (
        [1.0, 3.0, 2.0, 0.0],
        SamplingParams(logit_bias=tuple((token, -INF) for token in range(4))),
        True,
    ),
    "a token that there is not": ([1.0, 3.0, 2.0, 0.0], SamplingParams(logit_bias=((9, 1.0),)), False),
}


@pytest.mark.parametrize("bad", BAD_ROWS)
@pytest.mark.parametrize(
    "ways",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 2.0, "top_k": 2},
        {"temperature": 1e-4, "min_p": 0.1},
    ],
    ids=str,
)
def test_a_row_without_a_token_ends_its_own_answer_only(ways: dict[str, float], bad: str) -> None:
    row, params, own_fault = BAD_ROWS[bad]
    good = [SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(seed=2, top_p=0.5)]
    logits = torch.tensor([[5.0, 1.0, 0.0, 2.0], row, [0.0, 1.0, 9.0, 2.0], [3.0, 2.9, 1.0, 0.0]])

    def draw(rows: list[int]) -> list[int | AnswerError]:
        poisoned = Sampler(replace(params, **ways), prompt_ids=[1])
        samplers = {0: Sampler(good[0]), 1: poisoned, 2: Sampler(good[1]), 3: Sampler(good[2])}
        return sample(logits[rows], [samplers[row] for row in rows])

    first, error, second, third = draw([0, 1, 2, 3])
    assert isinstance(error, AnswerError)
    assert error.own_fault is own_fault
    assert [first, second, third] == draw([0, 2, 3])


def test_the_end_may_come_where_nothing_else_may() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
    params = SamplingParams(temperature=0.0, min_tokens=5)
    only_ends = Sampler(params, end_ids=frozenset(range(3)))
    assert sample(logits, [only_ends, Sampler(params, end_ids=frozenset({1}))]) == [1, 2]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 9)
    expected = torch.log(torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True))
    described = logprobs_of(logits, [4, 0, 8], [0, 2, 50])
    for row, (token, top) in enumerate(zip([4, 0, 8], [0, 2, 9], strict=True)):
        assert described[row].chosen == pytest.approx(expected[row, token].item(), abs=1e-6)
        likeliest = sorted(range(9), key=lambda other: -expected[row, other].item())[:top]
        assert [other for other, _ in described[row].top] == likeliest
        for other, logprob in described[row].top:
            assert logprob == pytest.approx(expected[row, other].item(), abs=1e-6)
