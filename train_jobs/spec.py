"""What the driver tells every rank of a group: plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.config.train_section import TrainJobConfig

DATA = "data"
"""In a run's directory: what the task prepared of its data, e.g. the tokenized corpus."""
CHECKPOINTS = "checkpoints"
"""In a run's directory: the checkpoints."""
LOGS = "logs"
"""In a run's directory: what the ranks of a script printed."""
EXPORT = "export"
"""In a run's directory: the finished model in the Hugging Face format, until it is published."""
RAY_TRAIN = "ray_train"
"""In a run's directory: what Ray Train keeps for itself, until the job ends."""


@dataclass(frozen=True)
class GroupSpec:
    """One attempt of one group.

    Attributes:
        job: the job's id.
        run: the path or URI of the run's directory in the cluster's storage.
        attempt: counts from 1 over the life of the job.
        index: counts the groups of the attempt from 0.
        nodes: node id of every worker, in rank order.
    """

    job: str
    config: TrainJobConfig
    run: str
    attempt: int
    index: int
    nodes: tuple[str, ...]

    @property
    def world_size(self) -> int:
        return len(self.nodes)


def plan_groups(
    job: str, config: TrainJobConfig, run: str, attempt: int, granted: Sequence[str]
) -> list[GroupSpec]:
    """The groups that a grant pays for: one, of as many workers as its mesh can use.

    Args:
        granted: node id of every granted unit, which is the workers of one tensor-parallel group.
    """
    # Ranks of one node stand together: their collectives meet on the shorter way.
    ranks = sorted(node for node in granted for _ in range(config.parallel.tensor))
    inner = config.parallel.tensor * config.parallel.context
    return [GroupSpec(job, config, run, attempt, 0, tuple(ranks[: len(ranks) // inner * inner]))]
