"""Words in what is said to people."""

from __future__ import annotations

import shlex
from collections.abc import Mapping


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `1,000 ranks`; for nouns whose plural ends in s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def amounts(resources: Mapping[str, float]) -> str:
    """`2 CPU and 1 GPU`; `nothing`."""
    parts = [f"{amount:g} {name}" for name, amount in sorted(resources.items()) if amount]
    return " and ".join(parts) or "nothing"


def step_of(step: int, steps: int | None) -> str:
    """`12/200`; `12` where nobody knows how many there are."""
    return f"{step}/{steps}" if steps else str(step)


def lasting(seconds: float) -> str:
    """`40 s`, `3 min`, `2.5 h`: for what is only about so long."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def first_line(text: str) -> str:
    """The first line of a text that may have many, or none."""
    return next(iter(text.splitlines()), "")


def logs_of(name: str, *, request: str | None = None, replica: str | None = None) -> str:
    """The command that shows the logs of an app or a job, for a sentence: who is sent to a log is told which.

    Args:
        request, replica: ids; of what is about these only.
    """
    options = {"--request": request, "--replica": replica}
    words = [word for option, given in options.items() if given is not None for word in (option, given)]
    return f"`{shlex.join(['shoal', 'logs', name, *words])}`"
