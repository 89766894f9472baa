"""What the driver makes of a job's data, once for all ranks and attempts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cluster.config.sections.train import TrainJobConfig
from train_jobs.data.tokens import TokenStreams


def _images(config: TrainJobConfig, directory: Path) -> None:
    from train_jobs.data.images import prepare_images

    prepare_images(config, directory)


PREPARATIONS: dict[str, Callable[[TrainJobConfig, Path], object]] = {
    "causal_lm": TokenStreams.prepare,
    "image_classification": _images,
}
"""From the config's `task`; a task without preparation is not in it."""


def prepare_data(config: TrainJobConfig, directory: Path) -> None:
    """Fill the run's data directory; work that is complete already is not done again.

    Raises:
        RequestError: the data cannot be read, or is too small.
    """
    prepare = PREPARATIONS.get(config.task)
    if prepare is not None:
        prepare(config, directory)
