"""What a job's samples and their order are known by: where it changes, positions mean other samples."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from cluster.config.sections.train import TrainJobConfig

if TYPE_CHECKING:
    from train_jobs.data.source import Samples, StreamSamples


def samples_identity(config: TrainJobConfig, samples: Samples | StreamSamples, content: str | None) -> str:
    """The same for the same samples in the same order, as far as can be told.

    Args:
        content: a digest of what the samples are cut from; None where a task reads its data itself.
    """
    from train_jobs.data.source import StreamSamples  # takes torch with it, which a driver does without

    known: dict[str, Any] = {"content": content or [config.task, config.source], "seed": config.seed}
    if not isinstance(samples, StreamSamples):
        known["samples"] = len(samples)
    if not config.is_custom:
        data = config.data
        known["cut"] = [data.sequence_length, data.packing, data.shuffle_row_groups]
        # Neighbours of similar length are put together for one micro-batch; an older version did so in
        # another order.
        known["grouped"] = ["in windows", config.batch.micro] if data.group_by_length else None
    return digest(known)


def digest(facts: Any) -> str:
    """Of what JSON can hold."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
