"""What ranks draw at random: not the same where they see different data."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

import numpy as np
import torch

from train_jobs.parallel.mesh import Mesh


def key_of(seed: int, mesh: Mesh, group: str | None) -> tuple[int, ...]:
    """What the random numbers of a rank follow from.

    Ranks of one `tp` group compute the same activations together, so that they have one key. All others
    would drop out the same units of different samples if they had.

    Args:
        group: the name of its replica group, where there are several.
    """
    return seed, mesh.data_index, mesh.cp_index, zlib.crc32((group or "").encode())


def seed_generators(key: Sequence[int]) -> None:
    """Seed all of a process's generators."""
    words = np.random.SeedSequence(list(key)).generate_state(3)
    torch.manual_seed(int(words[0]))
    random.seed(int(words[1]))
    np.random.seed(words[2])
