"""No tenant gets more tokens than its limit, whatever its requests take; none waits for more than it owes."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_apps.gateway.reckoning import expected_tokens, prompt_tokens, text_tokens
from serve_apps.openai.chat_schema import ChatRequest
from serve_apps.openai.schema import CompletionRequest
from serve_apps.quotas.token_budget import RECOUNT_S, Admission, TokenBudget, TokenBudgets

LIMIT, MOST = 1000, 600
"""Tokens a minute, and of one request."""


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Running:
    """A request that takes its tokens evenly until it ends."""

    admission: Admission
    tokens: int
    began: float
    seconds: float

    def taken_now(self, clock: Clock) -> int:
        return self.taken(clock.now)

    def taken(self, now: float) -> int:
        return int(self.tokens * min(1.0, (now - self.began) / self.seconds))


@dataclass
class Load:
    """A tenant that asks at random, and what it got."""

    budget: TokenBudget
    taken: list[tuple[float, int]] = field(default_factory=list)
    """At each moment, how many tokens since the moment before."""
    most_beyond: int = 0
    """What those that ran at one moment then took beyond what was held for them."""


def run(
    seed: int,
    minutes: float,
    every_s: float,
    *,
    exact: bool,
    seconds: Sequence[float] = (0.5, 20.0, 200.0),
) -> Load:
    generator = random.Random(seed)
    clock = Clock()
    load = Load(TokenBudget(LIMIT, clock))
    running: list[Running] = []
    before: dict[int, int] = {}
    while clock.now < minutes * 60:
        pause = generator.random() < 0.1
        clock.now += generator.random() * 90 if pause else generator.expovariate(1 / every_s)
        now = clock.now
        new = 0
        for one in running:
            new += one.taken(now) - before.get(id(one), 0)
            before[id(one)] = one.taken(now)
        load.taken.append((now, new))
        for one in [one for one in running if one.began + one.seconds <= now]:
            running.remove(one)
            before.pop(id(one))
            one.admission.settle(one.tokens)
        for _ in range(generator.choice((1, 1, 1, 30))):
            tokens = generator.randint(1, MOST)
            expected = generator.randint(tokens, MOST) if exact else 20
            admission = load.budget.admit(expected)
            if admission is not None:
                one = Running(admission, tokens, clock.now, generator.choice(seconds))
                admission.taken = partial(one.taken_now, clock)
                running.append(one)
        beyond = sum(max(0, one.tokens - one.admission.held) for one in running)
        load.most_beyond = max(load.most_beyond, beyond)
    return load


def check_windows(taken: list[tuple[float, int]], beyond: int) -> None:
    """No window has more than its docstring says, wherever it begins and ends."""
    for begin in range(len(taken)):
        total = 0
        for at, tokens in taken[begin + 1 :]:
            total += tokens
            minutes = (at - taken[begin][0]) / 60
            assert total <= LIMIT * (minutes + 1) + MOST + beyond


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from((0.5, 5.0, 30.0)))
def test_any_minutes_have_no_more_than_their_limit_one_more_and_a_request(seed: int, every_s: float) -> None:
    check_windows(run(seed, minutes=8, every_s=every_s, exact=True).taken, beyond=0)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from((0.5, 5.0, 30.0)))
def test_what_is_taken_beyond_what_was_expected_counts_once_for_all_time(seed: int, every_s: float) -> None:
    load = run(seed, minutes=8, every_s=every_s, exact=False)
    check_windows(load.taken, load.most_beyond)


def test_over_a_long_time_a_tenant_gets_its_limit_and_no_more() -> None:
    for exact in (True, False):
        load = run(1, minutes=300, every_s=1.0, exact=exact, seconds=(0.5, 2.0))
        total = sum(tokens for _, tokens in load.taken)
        assert 0.8 * LIMIT * 300 < total <= LIMIT * 301 + MOST + load.most_beyond


def test_a_debt_is_paid_off_at_the_rate_of_the_limit_and_the_wait_is_told() -> None:
    now = 0.0
    budget = TokenBudget(60, lambda: now)
    admissions = [budget.admit(20) for _ in range(3)]
    assert budget.admit(1) is None
    assert budget.wait_s() == 1, "all that is held may be given back"
    for admission in admissions:
        assert admission is not None
        admission.settle(1000)
        admission.settle(1000)  # says nothing new
    assert budget.wait_s() == 2940
    now = 2939.0
    assert budget.admit(1) is None
    now = 2941.0
    assert budget.admit(1) is not None


def test_who_asks_for_nothing_saves_up_no_more_than_a_minute() -> None:
    now = 0.0
    budget = TokenBudget(60, lambda: now)
    now = 1e6
    taken = 0
    while (admission := budget.admit(10)) is not None:
        admission.settle(10)
        taken += 10
    assert taken == 60


def test_a_budget_that_is_not_used_is_forgotten_and_a_debt_is_not() -> None:
    now = 0.0
    budgets = TokenBudgets(lambda: now)
    for number in range(10_000):
        admission = budgets.find(f"tenant {number}", 100).admit(1)
        assert admission is not None
        admission.settle(1000 if number == 0 else 10)
        now += 10.0
        if number == 1:
            assert budgets.find("tenant 0", 100).admit(1) is None
    assert len(budgets) < 200
    assert budgets.find("tenant 9999", 100).admit(1) is not None
    assert not budgets.find("tenant 9999", 100).is_unused


def test_prompts_of_tokens_count_by_their_number() -> None:
    assert prompt_tokens([[1, 2, 3], [100_000] * 50]) == 53
    request = CompletionRequest.model_validate({"model": "chat", "prompt": [[1] * 5000]})
    assert expected_tokens(request, 7, b"x" * 9) == 5007


@pytest.mark.parametrize("text", ["中文的標記器有時候一個字要三個標記", "こんにちは世界", "Ünïcödé", "🙂🙃"])
def test_text_beyond_ascii_counts_by_what_no_tokenizer_exceeds(text: str) -> None:
    """Those of bytes take one for each, where they have merged nothing."""
    most = len(text.encode()) - sum(character.isascii() for character in text)
    for ascii_only in (True, False):
        body = json.dumps(text * 100, ensure_ascii=ascii_only).encode()
        assert text_tokens(body) >= 100 * most
        document = {"model": "chat", "messages": [{"role": "user", "content": text * 100}]}
        body = json.dumps(document, ensure_ascii=ascii_only).encode()
        assert expected_tokens(ChatRequest.model_validate(document), 0, body) >= 100 * most
    assert 20 <= text_tokens(b"words of English text " * 4) <= 25


def test_many_that_run_are_asked_now_and_then_and_not_by_each_that_comes() -> None:
    clock = Clock()
    budget = TokenBudget(10**9, clock)
    asked = [0]

    def taken() -> int:
        asked[0] += 1
        return 50

    for _ in range(100):
        admission = budget.admit(20)
        assert admission is not None
        admission.taken = taken
        clock.now += RECOUNT_S / 1000
    assert asked[0] == 0
    clock.now += RECOUNT_S
    for _ in range(100):
        assert budget.admit(1) is not None
    assert asked[0] == 100
    assert budget._held == 100 * 50 + 100
