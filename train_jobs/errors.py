"""Failures inside a rank, as they travel to the driver."""

from __future__ import annotations

import re

from cluster.errors import ShoalError


class LossError(ShoalError):
    """The loss or its gradient is not a number; stepping on would only destroy the model."""


class CheckpointError(ShoalError):
    """Checkpoints could not be saved more often than the job allows, or one could not be loaded."""


class ScriptError(ShoalError):
    """A script of the user's ended with an error.

    Attributes:
        output: the end of what it printed.
    """

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message)
        self.output = output


class ScriptHangError(ScriptError):
    """A script hangs: nothing of it was seen for too long. Its output is where its threads stood."""


class EndedEarlyError(ShoalError):
    """A rank of a script had ended, with exit code 0, when another one still needed it."""


class RankError(Exception):
    """An exception in one rank, as the driver judges it; made of strings, so that it always travels.

    Attributes:
        rank: global rank.
        step: steps done when it happened, where it is known.
        kind: name of the exception's class.
        bases: names of the classes that it derives from, the nearest first.
        message: its text.
        trace: its traceback, as Python prints it.
        collective: it came out of torch.distributed, most likely because another rank went away.
        died: its process ended without a word; `message` says how.
        hung: it did not get on, and was killed; `message` says for how long, `trace` where it was. With
            `collective` it waited for its peers, one of which did not come.
        collectives: how many it had begun when it hung, where they were counted.
    """

    def __init__(
        self,
        rank: int,
        step: int | None,
        kind: str,
        message: str,
        trace: str,
        collective: bool = False,
        died: bool = False,
        hung: bool = False,
        bases: tuple[str, ...] = (),
        collectives: int | None = None,
    ) -> None:
        super().__init__(rank, step, kind, message, trace, collective, died, hung, bases, collectives)
        self.rank = rank
        self.step = step
        self.kind = kind
        self.message = message
        self.trace = trace
        self.collective = collective
        self.died = died
        self.hung = hung
        self.bases = bases
        self.collectives = collectives

    def __str__(self) -> str:
        return f"rank {self.rank}, step {self.step}: {self.kind}: {self.message}"


def bases_of(error: BaseException) -> tuple[str, ...]:
    """The names of the classes that an exception's class derives from, the nearest first."""
    return tuple(each.__name__ for each in type(error).__mro__[1:] if each not in (BaseException, object))


_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)(?:: (.*))?$", re.DOTALL)
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:[ ]?", re.MULTILINE)
"""What torch writes in front of every line of a traceback."""


def last_exception(output: str) -> tuple[str, str] | None:
    """Class name and message of the exception whose traceback is the last in a program's output."""
    _, traceback, rest = _RANK_PREFIX.sub("", output).rpartition("Traceback (most recent call last):\n")
    lines = rest.splitlines() if traceback else []
    # Frames are indented; the exception is the first line that is not.
    found = next((_EXCEPTION.match(line) for line in lines if line and not line[0].isspace()), None)
    return None if found is None else (found[1], found[2] or "")
