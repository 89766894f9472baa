"""Which ranks take part in a step, asked anew at every step."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from train_jobs.data.order import Place


class Left(Exception):  # noqa: N818  (not an error)
    """The other groups go on without this one.

    Attributes:
        last: there are no others, so that it has to save what it did.
    """

    def __init__(self, last: bool) -> None:
        super().__init__(last)
        self.last = last


class Quorum(Protocol):
    """Where a rank learns its place in a step, and whether the step counts. All ranks call it alike."""

    @property
    def leads(self) -> bool:
        """Whether this rank's group writes the logs and the checkpoints."""

    @property
    def world_size(self) -> int:
        """Ranks that take part, of all groups."""

    @property
    def place(self) -> Place | None:
        """This rank's place in the step; None while its group takes its state from another one."""

    def start(self) -> Place | None:
        """Agree on who takes part in the step that begins; returns this rank's place.

        The training state may have come further on return: another group's, or that of a checkpoint.

        Raises:
            Left: this group does not.
        """

    def last_backward(self) -> None:
        """The next backward completes the gradients of this rank."""

    def total(self, sums: Tensor) -> Tensor | None:
        """Sum over all ranks; gradients are whole on return.

        Returns:
            None where a group was lost on the way: the step is done again.
        """

    def hold(self) -> None:
        """Wait until parameters and optimizer state may change."""

    def drop(self) -> None:
        """The step did not count: what it drew at random is drawn again."""


class WholeGroup:
    """The ranks of one group: always all of them, and every step counts."""

    leads = True

    def __init__(self, place: Place) -> None:
        self.place = place

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    def start(self) -> Place:
        return self.place

    def last_backward(self) -> None:
        pass

    def total(self, sums: Tensor) -> Tensor:
        dist.all_reduce(sums)
        return sums

    def hold(self) -> None:
        pass

    def drop(self) -> None:
        raise AssertionError("every step of one group counts")
