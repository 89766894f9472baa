"""What a scenario is, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infra.lab.faults.laboratory import Laboratory


@dataclass(frozen=True)
class Trial:
    """One fault, and what came of it.

    Attributes:
        seconds: from the fault to the next step; to a clear end, where the scenario is about that.
        state: which state the job went on from, in words.
        found_s: from the fault to the job's word on it; None where it has none to say.
        failure: class, rank and node, as the job found them.
        node: the one that was struck, where it was one.
        repeated: steps that were done again.
        lost: steps that stand nowhere.
        seen: whatever else is worth knowing, in words.
    """

    seconds: float
    state: str
    found_s: float | None = None
    failure: dict[str, Any] | None = None
    node: str | None = None
    repeated: int = 0
    lost: int = 0
    seen: str = ""


@dataclass(frozen=True)
class FaultOutcome:
    """What came of a scenario.

    Attributes:
        wrong: what must not be, a sentence each; empty when all is as it should be.
        bar_s: what the median of the seconds is held to.
    """

    trials: list[Trial]
    wrong: list[str] = field(default_factory=list)
    bar_s: float | None = None


class ClusterUse(IntEnum):
    """The cluster that a scenario is played on. Those on one and the same are run one after another."""

    SHARED = 0
    """One whose nodes are all processes of this machine; the scenario leaves it whole."""
    HOSTS = 1
    """One whose nodes are hosts of their own; the scenario leaves it whole."""
    OWN = 2
    """Its own: it takes it away, or needs another storage."""


@dataclass(frozen=True)
class Scenario:
    """A fault that is done for real, again and again.

    Attributes:
        name: what it is called on the command line.
        what: what happens, a sentence.
        run: does it so many times in the laboratory.
        missing: why it cannot be done on this machine; None where it can.
        use: the cluster that it takes.
    """

    name: str
    what: str
    run: Callable[[Laboratory, int], FaultOutcome]
    missing: Callable[[], str | None] = lambda: None
    use: ClusterUse = ClusterUse.SHARED
