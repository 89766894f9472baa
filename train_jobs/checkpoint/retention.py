"""Which checkpoints stay. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from cluster.config.sections.train import CheckpointConfig


@dataclass(frozen=True)
class Retention:
    """The newest few, the best few by a metric, and every n-th step for good.

    Attributes:
        newest: how many of the newest stay.
        best: how many of those with the best metric stay.
        every_steps: steps that are multiples of this stay for good; None keeps none of them for that.
        greater_is_better: of two metrics, the greater is the better.
    """

    newest: int
    best: int = 0
    every_steps: int | None = None
    greater_is_better: bool = False

    @classmethod
    def of(cls, config: CheckpointConfig) -> Retention:
        return cls(config.keep, config.keep_best, config.keep_every_steps, config.prefers_greater)

    def stay(self, metrics: Mapping[int, float | None]) -> set[int]:
        """The steps that stay.

        Args:
            metrics: of every checkpoint's step its metric, None where it was not evaluated. One that is no
                number is none of the best.
        """
        steps = sorted(metrics)
        kept = set(steps[-self.newest :])
        if self.every_steps is not None:
            kept |= {step for step in steps if step % self.every_steps == 0}
        return kept | set(self.ranked(metrics)[: self.best])

    def ranked(self, metrics: Mapping[int, float | None]) -> list[int]:
        """The steps whose metric is a number, the best first; of two equally good ones the newer is first."""
        rated = {step: value for step, value in metrics.items() if value is not None and isfinite(value)}
        sign = -1 if self.greater_is_better else 1
        return sorted(rated, key=lambda step: (sign * rated[step], -step))
