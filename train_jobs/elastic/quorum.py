"""Which ranks take part in a step, asked anew at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from train_jobs.data.order import Place
from train_jobs.metering.stragglers import Rank


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
    def ranks(self) -> Sequence[Rank]:
        """Who they are, in an order that all of them know."""

    @property
    def index(self) -> int:
        """This rank's place in that order."""

    @property
    def began(self) -> int:
        """The view in which the state was last read from a checkpoint, of several groups; 0 of one."""

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

    def forget(self) -> None:
        """The training state is of no use, in any group: the next `start` begins from a checkpoint."""


class WholeGroup:
    """The ranks of one group: always all of them, and every step counts.

    Args:
        restore: fills the training state from a checkpoint.
    """

    leads = True
    began = 0

    def __init__(self, place: Place, restore: Callable[[], None]) -> None:
        self.place = place
        self._restore = restore
        self._has_state = True

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    @cached_property
    def ranks(self) -> Sequence[Rank]:
        return [(None, rank) for rank in range(dist.get_world_size())]

    @property
    def index(self) -> int:
        return dist.get_rank()

    def start(self) -> Place:
        if not self._has_state:
            self._restore()
            self._has_state = True
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

    def forget(self) -> None:
        self._has_state = False
