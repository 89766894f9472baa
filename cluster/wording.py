"""Words in what is said to people."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `1,000 ranks`; for nouns whose plural ends in s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
