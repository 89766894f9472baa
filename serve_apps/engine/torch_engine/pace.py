"""How much of prompts a step may read beside running answers, so that those keep their flow; pure Python.

What a step takes is learned from the steps that were run: a sum of a few things that it does, each at a price
that is never negative. The prices are those of least squares over relative errors, with older steps counting
less and less. A step that took far too long for a reason of its own (the first one, a busy machine) has a
relative error of at most 1, whatever it took, and so moves the prices little.
"""

from __future__ import annotations

from dataclasses import dataclass

from serve_apps.engine.torch_engine.step import Step

LEAST_TOKENS = 32
"""Tokens of a prompt that each step reads at the least, however long they take: a prompt always goes on.
Fewer would take little less: what has been read of the prompt is read again for each piece of it."""

_REMEMBERED = 0.95
"""How much older steps of its kind count with each new one: about twenty of them are remembered."""
_SWEEPS = 8
"""Rounds of coordinate descent a step; they start from the prices that there are."""
_SHORTEST_S = 1e-6
_GROWTH = 2
"""A piece is at most so many times as large as any that was measured."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step does, in the numbers that its time follows from."""

    answers: int = 0
    """Tokens of running answers."""
    answers_seen: int = 0
    """Tokens that those attend to."""
    tokens: int = 0
    """Tokens of prompts."""
    before: int = 0
    """Tokens of these prompts that earlier steps have read."""
    pairs: int = 0
    """Tokens of prompts, each times the tokens that it attends to."""

    @classmethod
    def of(cls, step: Step) -> StepWork:
        answers = answers_seen = tokens = before = pairs = 0
        for row in step.rows:
            new = len(row.tokens)
            if new == 1:
                answers += 1
                answers_seen += row.start + 1
            else:
                tokens += new
                before += row.start
                pairs += pairs_of(row.start, new)
        return cls(answers, answers_seen, tokens, before, pairs)

    @property
    def features(self) -> tuple[float, ...]:
        return (1.0, self.answers, self.answers_seen, self.tokens, self.before, self.pairs)


_NUM_FEATURES = len(StepWork().features)
_ORDER = (3, 5, 4, 1, 2, 0)
"""Prices of prompts first: what little is known at the start is put down to them, not to every step."""


def pairs_of(start: int, new: int) -> int:
    """What `new` tokens from position `start` on attend to, together."""
    return new * start + new * (new + 1) // 2


class StepCosts:
    """What steps take, learned from those that were measured."""

    def __init__(self) -> None:
        self._prices = [0.0] * _NUM_FEATURES
        """Seconds for one of each feature of `StepWork`."""
        # Sums over steps with and without prompts: many of one kind must not make the other forgotten.
        self._sums = {reading: _Sums() for reading in (False, True)}
        self.most_tokens = 0
        """Most tokens of prompts in a measured step."""
        self.most_pairs = 0

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step."""
        features = work.features
        # One that seems to take no time at all would count more than all others.
        least = max(_SHORTEST_S, self.predict(work) / 4)
        self._sums[work.tokens > 0].add(features, max(seconds, least))
        if work.tokens:
            self.most_tokens = max(self.most_tokens, work.tokens)
            self.most_pairs = max(self.most_pairs, work.pairs)
            self._solve()

    def predict(self, work: StepWork) -> float:
        """Seconds that a step takes; 0 of what nothing is known."""
        return sum(price * number for price, number in zip(self._prices, work.features, strict=True))

    def prompt_prices(self) -> tuple[float, float, float]:
        """Seconds for a token of a prompt, for a token before it, and for a pair of the two."""
        tokens, before, pairs = self._prices[3:]
        return tokens, before, pairs

    def _solve(self) -> None:
        one, other = self._sums.values()
        matrix = [_plus(row, more) for row, more in zip(one.matrix, other.matrix, strict=True)]
        target = _plus(one.target, other.target)
        prices = self._prices
        for _ in range(_SWEEPS):
            for i in _ORDER:
                row = matrix[i]
                if row[i] > 0:
                    rest = sum(entry * price for entry, price in zip(row, prices, strict=True))
                    prices[i] = max(0.0, prices[i] + (target[i] - rest) / row[i])


def _plus(one: list[float], other: list[float]) -> list[float]:
    return [a + b for a, b in zip(one, other, strict=True)]


class _Sums:
    """The normal equations of the steps of one kind, each divided by the time that it took."""

    def __init__(self) -> None:
        self.matrix = [[0.0] * _NUM_FEATURES for _ in range(_NUM_FEATURES)]
        self.target = [0.0] * _NUM_FEATURES

    def add(self, features: tuple[float, ...], seconds: float) -> None:
        scaled = [number / seconds for number in features]
        for i, number in enumerate(scaled):
            self.target[i] = _REMEMBERED * self.target[i] + number
            row = self.matrix[i]
            for j, other in enumerate(scaled):
                row[j] = _REMEMBERED * row[j] + number * other


class Allowance:
    """What is left of one step's time for prompts.

    Args:
        seconds: what they may take together.
        least: tokens that the first of them gets in any case.
    """

    def __init__(self, costs: StepCosts, seconds: float, least: int = LEAST_TOKENS) -> None:
        self._costs = costs
        self._seconds = seconds
        self._least = least
        self._tokens = max(least, _GROWTH * costs.most_tokens)
        self._pairs = _GROWTH * costs.most_pairs

    def take(self, start: int, most: int) -> int:
        """How many tokens of a prompt are read, from position `start` on; at most `most`, and 0 for none."""
        price, before, pair = self._costs.prompt_prices()
        left = self._seconds - before * start
        known = min(self._tokens, _largest(start, self._pairs, 0.0, 1.0))
        new = min(most, max(self._least, min(known, _largest(start, left, price, pair))))
        self._least = 0
        self._tokens -= new
        self._pairs -= pairs_of(start, new)
        self._seconds = left - price * new - pair * pairs_of(start, new)
        return new


def _largest(start: int, room: float, price: float, pair: float) -> int:
    """The most tokens from `start` on that take no more than `room`; _ANY where they are free."""
    if room <= 0:
        return 0
    linear, square = price + pair * (start + 0.5), pair / 2
    if square == 0:
        return int(min(room / linear, _ANY)) if linear else _ANY
    return int(min(2 * room / (linear + (linear * linear + 4 * square * room) ** 0.5), _ANY))


_ANY = 2**31
