"""Which ranks take part in a step, asked anew at every step."""

from __future__ import annotations

from typing import Protocol

from train_jobs.data.order import Place


class Quorum(Protocol):
    """Where a rank learns its place in a step, and whether the step counts."""

    def start(self, step: int) -> Place:
        """This rank's place among the data-parallel ranks of the step that begins."""

    def commit(self) -> bool:
        """Whether the step counts; where it does not, it is done again. The same on all ranks."""


class WholeGroup:
    """The ranks of one group: always all of them, and every step counts."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def start(self, step: int) -> Place:
        return self.place

    def commit(self) -> bool:
        return True
