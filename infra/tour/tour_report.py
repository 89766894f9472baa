"""What came of each step of the tour."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.errors import ShoalError


@dataclass
class TourStep:
    """One step of the tour, as the result lists it."""

    name: str
    ok: bool = False
    seconds: float = 0.0
    detail: str = ""


@dataclass
class QuickstartReport:
    """The outcome of a quickstart."""

    ok: bool = False
    seconds: float = 0.0
    steps: list[TourStep] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class StepError(ShoalError):
    """A step did not do what it says."""


def require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise StepError(otherwise)
