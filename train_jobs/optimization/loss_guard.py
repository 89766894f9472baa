"""What is done about a loss that is not a number, or far above those of the steps before. Pure.

Every rank has a guard of its own and shows it the same totals, so that all decide alike; its state is saved,
and handed on to groups that join, with the rest of the training state.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cluster.config.sections.train import RecoveryConfig
from train_jobs.data.order import batch_of_step
from train_jobs.errors import LossError

MAD_OF_NORMAL = 1.4826
"""Makes of the median absolute deviation what the standard deviation is, for a normal distribution."""
LEAST_SPREAD = 0.01
"""Of the median: losses that hardly differ make no spike of the first one that does."""

Policy = Literal["stop", "warn", "skip", "go_back"]


@dataclass(frozen=True)
class BadStep:
    """What is wrong with a step, and what the config wants done about it.

    Attributes:
        reason: the beginning of a sentence that ends with the step.
    """

    policy: Policy
    reason: str


@dataclass(frozen=True)
class Return:
    """A way back to a checkpoint.

    Attributes:
        passed_over: the global batches that are not taken any more.
        count: of the ways back of this job, with this one.
        before: only a checkpoint of fewer steps is good enough; None for any.
    """

    passed_over: tuple[int, ...]
    count: int
    before: int | None


class LossGuard:
    """Judges the loss of each step before its update, and the norm of its gradient.

    A loss is a spike when it is above the median of the last steps that were updated by more than `threshold`
    robust standard deviations: median and median absolute deviation do not follow the very values they are to
    find (Hampel, The Influence Curve and Its Role in Robust Estimation, JASA 1974; for this use, Leys et al.,
    J. Exp. Soc. Psychol. 2013). Of normally distributed losses one in a billion is above six of them. A
    falling loss widens the spread, so that nothing is called a spike too early.

    Going back to a checkpoint and passing over the batch of the spike is what PaLM's training did (Chowdhery
    et al., 2022, section 5.1).

    Attributes:
        went_back: how often the job went back to a checkpoint.
        passed_over: global batches that it left out for that, in order.
        returning: the way back that was begun, until a checkpoint is loaded or another group's state taken.
    """

    def __init__(self, config: RecoveryConfig) -> None:
        self.config = config
        self.went_back = 0
        self.passed_over: tuple[int, ...] = ()
        self.returning: Return | None = None
        self._losses: deque[float] = deque(maxlen=config.loss_spike.window_steps)
        self._spiking = False
        self._skipped = 0
        """Steps in a row."""
        self._came_back = False
        """No step was done since the job went back."""

    @property
    def skips(self) -> bool:
        """Whether a step may have to be left out."""
        return "skip" in (self.config.non_finite_loss, self.config.loss_spike.policy)

    @property
    def goes_back(self) -> bool:
        """Whether the job may have to go back, and needs a checkpoint before its first step."""
        return "go_back" in (self.config.non_finite_loss, self.config.loss_spike.policy)

    def look(self, loss: float) -> BadStep | None:
        """What is wrong with the loss of a step; None where nothing is, or nothing that was not said."""
        if not math.isfinite(loss):
            return BadStep(self.config.non_finite_loss, f"the loss is {loss}")
        policy = self.config.loss_spike.policy
        limit = self._limit()
        if policy is None or limit is None or loss <= limit or (policy == "warn" and self._spiking):
            return None
        middle = statistics.median(self._losses)
        return BadStep(
            policy,
            f"the loss is {loss:.6g}, above {limit:.6g} (of the {len(self._losses)} steps before, the median "
            f"is {middle:.6g})",
        )

    def look_at_norm(self, norm: float) -> BadStep:
        """What a norm of the gradient that is not finite comes to."""
        return BadStep(self.config.non_finite_loss, f"the norm of the gradient is {norm}")

    def took(self, loss: float) -> None:
        """The update of a step was made."""
        self._skipped, self._came_back = 0, False
        if self.config.loss_spike.policy is not None:
            limit = self._limit()
            self._spiking = limit is not None and loss > limit
            self._losses.append(loss)

    def skip(self, bad: BadStep, step: int) -> None:
        """Leave out the update of a step (from 0).

        Raises:
            LossError: too many in a row were left out.
        """
        if self._skipped == self.config.skips_in_a_row:
            raise LossError(
                f"{bad.reason} in step {step + 1}, after {self._skipped} skipped steps in a row; "
                "recovery.skips_in_a_row allows no more"
            )
        self._skipped, self._came_back = self._skipped + 1, False

    def go_back(self, bad: BadStep, step: int) -> None:
        """Begin a way back from a step (from 0); `returning` says to where.

        Where no step was done since the last one, the checkpoint itself is no better: the way leads to an
        older one, and the batch that made it so is passed over too.

        Raises:
            LossError: the job went back too often.
        """
        if self.went_back == self.config.go_backs:
            raise LossError(
                f"{bad.reason} in step {step + 1}, and the job went back {self.went_back} times already; "
                "recovery.go_backs allows no more"
            )
        blamed = {self.batch(step)}
        if self._came_back and step:
            blamed.add(self.batch(step - 1))
        self.returning = Return(
            tuple(sorted({*self.passed_over, *blamed})),
            self.went_back + 1,
            step if self._came_back else None,
        )

    def returned(self, way: Return) -> None:
        """The checkpoint is loaded; what the way back leaves out is not part of it."""
        self.passed_over = tuple(sorted({*self.passed_over, *way.passed_over}))
        self.went_back, self._came_back = way.count, True

    def batch(self, step: int) -> int:
        """The global batch that a step takes; both count from 0."""
        return batch_of_step(step, self.passed_over)

    def batches(self, steps: int) -> int:
        """Global batches that so many steps have used up."""
        return self.batch(steps - 1) + 1 if steps else 0

    def state(self) -> dict[str, Any]:
        return {
            "went_back": self.went_back,
            "passed_over": list(self.passed_over),
            "losses": list(self._losses),
            "spiking": self._spiking,
            "skipped": self._skipped,
            "came_back": self._came_back,
        }

    def load(self, state: dict[str, Any] | None) -> None:
        """Take what `state` gave; None where it was saved before there was a guard."""
        known = state or {}
        self.returning = None
        self.went_back = known.get("went_back", 0)
        self.passed_over = tuple(known.get("passed_over", ()))
        self._losses = deque(known.get("losses", ()), maxlen=self.config.loss_spike.window_steps)
        self._spiking = known.get("spiking", False)
        self._skipped = known.get("skipped", 0)
        self._came_back = known.get("came_back", False)

    def _limit(self) -> float | None:
        """What a loss may be; None while too few are known."""
        spike = self.config.loss_spike
        if len(self._losses) < spike.window_steps:
            return None
        return spike_limit(self._losses, spike.threshold)


def spike_limit(losses: Sequence[float] | deque[float], threshold: float) -> float:
    """The loss above which one is a spike after these."""
    middle = statistics.median(losses)
    deviation = statistics.median(abs(loss - middle) for loss in losses)
    return middle + threshold * max(MAD_OF_NORMAL * deviation, LEAST_SPREAD * abs(middle))
