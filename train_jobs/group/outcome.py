"""How a group ended, and what its ranks told of it."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field

from cluster.wording import first_line
from train_jobs.errors import RankError


@dataclass(frozen=True)
class RankFailure:
    """How one rank ended; `kind`, `message` and `trace` as in train_jobs.errors.RankError.

    `died` means that the process went away without a word, `hung` that it did not get on and was killed,
    having begun so many `collectives`.
    """

    rank: int | None
    step: int | None
    kind: str
    message: str
    trace: str
    died: bool = False
    collective: bool = False
    hung: bool = False
    bases: tuple[str, ...] = ()
    collectives: int | None = None


@dataclass(frozen=True)
class GroupOutcome:
    """How a group ended, with what its ranks reported.

    Attributes:
        status: "finished" (the model is exported), "followed" (another group exports it), "stopped", "left"
            or "failed".
    """

    status: str
    failures: list[RankFailure] = field(default_factory=list)


def rank_failure(rank: int, error: BaseException) -> RankFailure:
    """What the end of a rank's worker tells of the rank."""
    if isinstance(error, RankError):
        return RankFailure(
            error.rank,
            error.step,
            error.kind,
            error.message,
            error.trace,
            died=error.died,
            collective=error.collective,
            hung=error.hung,
            bases=error.bases,
            collectives=error.collectives,
        )
    if type(error).__module__.partition(".")[0] == "ray":
        # Ray's own word for a worker that ended or does not answer; what happens in a rank is a RankError.
        return RankFailure(rank, None, type(error).__name__, first_line_of(error), str(error), died=True)
    trace = "".join(traceback.format_exception(error))
    return RankFailure(rank, None, type(error).__name__, str(error), trace)


def first_line_of(error: BaseException) -> str:
    """What an exception says, in a line; its class where it says nothing."""
    return first_line(str(error)) or type(error).__name__
