"""What the driver makes of a job's data, once for all ranks and attempts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cluster.config.sections.train import TrainJobConfig
from cluster.files.local_copy import files_here
from cluster.files.storage import Storage, as_storage
from train_jobs.data.tokenizing import Encode, Tell, encode_here
from train_jobs.data.tokens import prepare_tokens, tokens_are_there

Prepare = Callable[[TrainJobConfig, Storage, Tell, Encode, bool, Storage | None], bool]
"""Does what `prepare_data` says, for one task."""


def _images(
    config: TrainJobConfig,
    place: Storage,
    tell: Tell,
    encode: Encode,
    hand_over: bool,
    notes: Storage | None,
) -> bool:
    from train_jobs.data.images import prepare_images

    with files_here(place) as here:  # what is known of images is small; they stay where they are
        changed = prepare_images(config, here)
        if changed and place.local_path() is None:
            place.upload_dir(here)
    return changed


PREPARATIONS: dict[str, Prepare] = {"causal_lm": prepare_tokens, "image_classification": _images}
"""From the config's `task`; a task without preparation is not in it."""


FIRST_WORD_S, WORD_S = 5.0, 10.0
"""How soon, and how often, a person is told how far it is."""


def is_prepared(config: TrainJobConfig, directory: Storage | Path) -> bool:
    """Whether `prepare_data` has nothing to do but to look at what is there."""
    return config.task not in PREPARATIONS or (
        config.task == "causal_lm" and tokens_are_there(config, directory)
    )


def prepare_data(
    config: TrainJobConfig,
    directory: Storage | Path,
    tell: Tell = lambda _: None,
    encode: Encode = encode_here,
    hand_over: bool = False,
    notes: Storage | None = None,
) -> bool:
    """Fill the run's data directory; what was made of the same data in the same way is not made again.

    Args:
        tell: told again and again how far that is.
        encode: encodes the parts of a corpus.
        hand_over: it ends where it takes long and others could help.
        notes: where jobs note what they have made of their data, see train_jobs.data.made_before.

    Returns:
        whether anything in the directory is another than before.

    Raises:
        LongWorkError: it is handed over; what was done is kept.
        RequestError: the data cannot be read, or is too small.
    """
    prepare = PREPARATIONS.get(config.task)
    return prepare is not None and prepare(config, as_storage(directory), tell, encode, hand_over, notes)
