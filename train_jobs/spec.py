"""What the driver tells every rank of a group: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.config.train_section import TrainJobConfig

TOKENS = "data"
"""In a run's directory: the tokenized corpus."""
CHECKPOINTS = "checkpoints"
"""In a run's directory: the checkpoints."""
EXPORT = "export"
"""In a run's directory: the finished model in the Hugging Face format, until it is published."""
RAY_TRAIN = "ray_train"
"""In a run's directory: what Ray Train keeps for itself, until the job ends."""


@dataclass(frozen=True)
class GroupSpec:
    """One attempt of one group.

    Attributes:
        job: the job's id.
        run: the run's directory, on storage that every node mounts.
        attempt: counts from 1 over the life of the job.
        nodes: node id of every worker, in rank order.
    """

    job: str
    config: TrainJobConfig
    run: Path
    attempt: int
    nodes: tuple[str, ...]

    @property
    def world_size(self) -> int:
        return len(self.nodes)
