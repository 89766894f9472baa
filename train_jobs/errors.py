"""Failures inside a rank, as they travel to the driver."""

from __future__ import annotations

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
    ) -> None:
        super().__init__(rank, step, kind, message, trace, collective, died, hung, bases)
        self.rank = rank
        self.step = step
        self.kind = kind
        self.message = message
        self.trace = trace
        self.collective = collective
        self.died = died
        self.hung = hung
        self.bases = bases

    def __str__(self) -> str:
        return f"rank {self.rank}, step {self.step}: {self.kind}: {self.message}"


def bases_of(error: BaseException) -> tuple[str, ...]:
    """The names of the classes that an exception's class derives from, the nearest first."""
    return tuple(each.__name__ for each in type(error).__mro__[1:] if each not in (BaseException, object))
