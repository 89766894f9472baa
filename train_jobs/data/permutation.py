"""A shuffled order of any length that takes no memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

import numpy as np

_ROUNDS = 8
_WORD = 2**64 - 1


class Permutation:
    """A permutation of 0 … n-1 that follows from a key; each element is computed when it is asked for.

    A Feistel network over two numbers of about √n each, walked along until the result is below n (Black and
    Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002). In rounds one number is moved by what the
    other is mixed to, which can be undone: so no two places get the same element. It is no cipher, and need
    not be one.

    Args:
        key: numbers from 0 on, as numpy's generators are seeded.
    """

    def __init__(self, length: int, key: Sequence[int]) -> None:
        self._length = length
        self._high = isqrt(max(0, length - 1)) + 1
        self._low = -(-length // self._high)
        words = np.random.SeedSequence(list(key)).generate_state(_ROUNDS, np.uint64)
        self._keys = [int(word) for word in words]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < self._length:
            raise IndexError(f"{place} of {self._length}")
        while (place := self._moved(place)) >= self._length:
            pass
        return place

    def _moved(self, place: int) -> int:
        high, low = divmod(place, self._low)
        for number, key in enumerate(self._keys):
            if number % 2:
                low = (low + _mixed(key ^ high)) % self._low
            else:
                high = (high + _mixed(key ^ low)) % self._high
        return high * self._low + low


def _mixed(word: int) -> int:
    """SplitMix64's output function (Steele, Lea and Flood, OOPSLA 2014)."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
