"""What went wrong with a group, and whether the job may be tried again: pure logic."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cluster.errors import RequestError

_BACKOFF_START_S = 1.0
_BACKOFF_MOST_S = 30.0


class FailureClass(StrEnum):
    """Who or what failed."""

    WORKER = "worker"
    """A worker process ended."""
    NODE = "node"
    """A node went away, with its workers."""
    HANG = "hang"
    """A rank did not get on, or a collective did not return, within the hang timeout."""
    CODE = "code"
    """An exception in the code that is trained with."""
    REQUEST = "request"
    """What the job asks for cannot be done, as a rank saw."""
    START = "start"
    """The group could not be started, or Ray Train's controller failed."""


@dataclass(frozen=True)
class RankFailure:
    """How one rank ended; `kind`, `message` and `trace` as in train_jobs.errors.RankError.

    `died` means that the process went away without a word, `hung` that it did not get on and was killed.
    """

    rank: int | None
    step: int | None
    kind: str
    message: str
    trace: str
    died: bool = False
    collective: bool = False
    hung: bool = False


@dataclass(frozen=True)
class Failure:
    """The failure of a group, as it is logged and judged."""

    failure_class: FailureClass
    reason: str
    rank: int | None = None
    node: str | None = None
    step: int | None = None
    trace: str = ""

    @property
    def signature(self) -> tuple[str, int | None]:
        """Two failures of the same signature are the same mistake coming back."""
        return self.reason, self.step


def classify(
    failures: Sequence[RankFailure],
    rank_nodes: Sequence[str],
    alive: Collection[str],
    names: Mapping[str, str],
) -> Failure:
    """Find the cause among what the ranks of one group reported.

    A rank that loses its peer fails too, in a collective; it is only believed where nothing else failed.

    Args:
        rank_nodes: node id of each rank.
        alive: ids of the nodes that are alive now.
        names: names of nodes by id.
    """
    gone = [rank for rank, node in enumerate(rank_nodes) if node not in alive]
    if gone:
        node = rank_nodes[gone[0]]
        name = names.get(node, node)
        return Failure(FailureClass.NODE, f"node {name} went away", rank=gone[0], node=name)

    def found(failure: RankFailure, failure_class: FailureClass, reason: str) -> Failure:
        node = rank_nodes[failure.rank] if failure.rank is not None else None
        return Failure(
            failure_class,
            reason,
            rank=failure.rank,
            node=names.get(node, node) if node else None,
            step=failure.step,
            trace=failure.trace,
        )

    hung = sorted((each for each in failures if each.hung), key=lambda each: "stopped" not in each.message)
    if hung:  # those that wait for the one that hangs do not get on either
        return found(hung[0], FailureClass.HANG, f"rank {hung[0].rank} {hung[0].message}")
    for failure in failures:
        if not failure.died and not failure.collective and failure.rank is not None:
            if failure.kind == RequestError.__name__:
                return found(failure, FailureClass.REQUEST, failure.message)
            return found(failure, FailureClass.CODE, f"{failure.kind}: {failure.message}")
    for failure in failures:
        if failure.died:
            whose = "the group" if failure.rank is None else f"rank {failure.rank}"
            return found(failure, FailureClass.WORKER, f"the process of {whose} ended: {failure.message}")
    for failure in failures:
        if failure.collective:
            if "timed out" in failure.message.lower() or "timeout" in failure.message.lower():
                return found(failure, FailureClass.HANG, f"a collective did not return: {failure.message}")
            return found(
                failure, FailureClass.WORKER, f"rank {failure.rank} lost another rank: {failure.message}"
            )
    first = (
        failures[0]
        if failures
        else RankFailure(None, None, "Unknown", "the group ended without a reason", "")
    )
    return Failure(FailureClass.START, f"{first.kind}: {first.message}", trace=first.trace)


@dataclass(frozen=True)
class Decision:
    """Try again after `backoff_s` seconds, or give up for `reason`."""

    again: bool
    backoff_s: float = 0.0
    reason: str = ""


class FailureBudget:
    """Counts the failures of one job and decides about the next attempt.

    Workers, nodes, hangs and starts share `worker_failures`, counted anew whenever the job got further.
    The user's code gets a second chance, not a third: an exception that comes back at the same step, or
    before the first step, is a mistake that another attempt cannot mend.
    """

    def __init__(self, worker_failures: int) -> None:
        self.worker_failures = worker_failures
        self._spent = 0
        self._furthest = -1
        self._seen: set[tuple[str, int | None]] = set()

    def decide(self, failure: Failure, step: int) -> Decision:
        """Judge a failure that came when the job had done `step` steps."""
        if failure.failure_class is FailureClass.REQUEST and step == 0:
            return Decision(False, reason="another attempt cannot mend it")
        # Of a job that has stepped a request was right: some file could not be read for a moment.
        if failure.failure_class in (FailureClass.CODE, FailureClass.REQUEST):
            if failure.signature in self._seen:
                return Decision(False, reason=f"the same exception came back at step {failure.step}")
            self._seen.add(failure.signature)
        if step > self._furthest:
            self._furthest, self._spent = step, 0
        self._spent += 1
        if self._spent > self.worker_failures:
            return Decision(
                False,
                reason=f"{self._spent} failures in a row at step {step}; recovery.worker_failures "
                f"allows {self.worker_failures}",
            )
        # The first failure is most likely a lost process: nothing is gained by waiting.
        backoff = 0.0 if self._spent == 1 else min(_BACKOFF_MOST_S, _BACKOFF_START_S * 2 ** (self._spent - 2))
        return Decision(True, backoff)
