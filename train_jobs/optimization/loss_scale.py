"""The scale that keeps fp16 gradients from becoming zero or infinite. Pure."""

from __future__ import annotations

from typing import Any

GROWTH = 2.0
BACKOFF = 0.5
GROWTH_INTERVAL = 2000
"""Good steps in a row after which a larger scale is tried; all three are torch.amp.GradScaler's."""
START = 2.0**16
LEAST = 2.0**-14
"""A scale below this means that the gradients themselves are broken, not their format."""


class LossScale:
    """Dynamic loss scaling (Micikevicius et al., Mixed Precision Training, ICLR 2018).

    The loss is multiplied by `value` before backward; a step whose gradient norm then is not finite is left
    out and the scale halved. torch's GradScaler looks for such gradients tensor by tensor, which it cannot
    where they lie on different meshes; the global norm, which is computed anyway and is the same on all
    ranks, tells the same.

    Args:
        enabled: false leaves `value` at 1, and no step is left out.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.value = START if enabled else 1.0
        self.good_steps = 0

    def update(self, finite: bool) -> None:
        """Take in whether the gradients of a step were finite."""
        if not self.enabled:
            return
        if not finite:
            self.value, self.good_steps = self.value * BACKOFF, 0
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.value, self.good_steps = self.value * GROWTH, 0

    @property
    def exhausted(self) -> bool:
        """Whether no scale makes the gradients finite."""
        return self.value < LEAST

    @property
    def shown(self) -> float:
        """What is written into the metrics."""
        return self.value

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "good_steps": self.good_steps}

    def load(self, state: dict[str, Any]) -> None:
        if self.enabled:
            self.value, self.good_steps = state["value"], state["good_steps"]
