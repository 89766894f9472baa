"""What the driver makes of a job's data, once for all ranks and attempts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cluster.config.sections.train import TrainJobConfig
from train_jobs.data.tokens import Tell, prepare_tokens, tokens_are_there


def _images(config: TrainJobConfig, directory: Path, tell: Tell) -> bool:
    from train_jobs.data.images import prepare_images

    return prepare_images(config, directory)


PREPARATIONS: dict[str, Callable[[TrainJobConfig, Path, Tell], bool]] = {
    "causal_lm": prepare_tokens,
    "image_classification": _images,
}
"""From the config's `task`; a task without preparation is not in it."""


FIRST_WORD_S, WORD_S = 5.0, 10.0
"""How soon, and how often, a person is told how far it is."""


def is_prepared(config: TrainJobConfig, directory: Path) -> bool:
    """Whether `prepare_data` has nothing to do but to look at what is there."""
    return config.task not in PREPARATIONS or (
        config.task == "causal_lm" and tokens_are_there(config, directory)
    )


def prepare_data(config: TrainJobConfig, directory: Path, tell: Tell = lambda _: None) -> bool:
    """Fill the run's data directory; what was made of the same data in the same way is not made again.

    Args:
        tell: told again and again how far that is.

    Returns:
        whether anything in the directory is another than before.

    Raises:
        RequestError: the data cannot be read, or is too small.
    """
    prepare = PREPARATIONS.get(config.task)
    return prepare is not None and prepare(config, directory, tell)
