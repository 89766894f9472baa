"""What the driver tells every rank of a group: plain data."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.config.sections.train import TrainJobConfig
from cluster.environment import passed_on

DATA = "data"
"""In a run's directory: what the task prepared of its data, e.g. the tokenized corpus."""
PREPARED = "prepared"
"""In the cluster's storage: where jobs note what data they have prepared."""
CHECKPOINTS = "checkpoints"
"""In a run's directory: the checkpoints."""
WORK = "work"
"""In a run's directory: where a script runs, with the files that were submitted."""
LOGS = "logs"
"""In a run's directory: what the ranks of a script printed."""
EXPORT = "export"
"""In a run's directory: the finished model in the Hugging Face format, until it is published."""
EXPORT_FACTS = f"{EXPORT}.json"
"""Beside it, written after it: `export`, which names this model among those of the job, its `step`, and the
`evaluation` of that."""
RAY_TRAIN = "ray_train"
"""In a run's directory: what Ray Train keeps for itself, until the job ends."""


@dataclass(frozen=True)
class GroupSpec:
    """One attempt of one group.

    Attributes:
        job: the job's id.
        run: the path or URI of the run's directory in the cluster's storage.
        attempt: counts from 1 over the life of the job.
        index: counts the groups of the attempt from 0; below that are workers that stand by for one.
        nodes: node id of every worker, in rank order.
    """

    job: str
    config: TrainJobConfig
    run: str
    attempt: int
    index: int
    nodes: tuple[str, ...]

    @property
    def name(self) -> str:
        """Unique in the life of the job."""
        return f"{self.attempt}-{self.index}"

    @property
    def world_size(self) -> int:
        return len(self.nodes)


def plan_groups(
    job: str, config: TrainJobConfig, run: str, attempt: int, granted: Sequence[str]
) -> list[GroupSpec]:
    """The groups that a grant pays for: one of as many workers as its mesh can use, or replica groups.

    Args:
        granted: node id of every granted unit, which is the workers that stand together on a node; the units
            of a replica group stand together.
    """
    inner = math.lcm(config.unit_size, config.parallel.tensor * config.parallel.context)
    size = config.group_size or len(granted) * config.unit_size // inner * inner
    units = size // config.unit_size
    if config.group_size is None:
        granted = sorted(granted)[:units]
    gangs = [granted[first : first + units] for first in range(0, len(granted), max(1, units))]
    return [
        group_spec(job, config, run, attempt, index, gang)
        for index, gang in enumerate(gangs)
        if len(gang) == units
    ]


def group_spec(
    job: str, config: TrainJobConfig, run: str, attempt: int, index: int, units: Sequence[str]
) -> GroupSpec:
    """One group on the nodes of these units."""
    # Ranks of one node stand together: their collectives meet on the shorter way.
    nodes = tuple(node for node in sorted(units) for _ in range(config.unit_size))
    return GroupSpec(job, config, run, attempt, index, nodes)


def command_digest(config: TrainJobConfig) -> str:
    """Of what a script's ranks run: another one where something of it was changed."""
    keys = ("script", "module", "cwd", "arguments", "env", "pip")
    command = {key: getattr(config, key) for key in keys}
    return hashlib.sha256(json.dumps(command, sort_keys=True).encode()).hexdigest()[:16]


def env_of(config: TrainJobConfig, caller: Mapping[str, str]) -> dict[str, str]:
    """The variables that a job gives its processes.

    Args:
        caller: the environment that a null passes on from: of whoever submits the job, or of its driver.

    Raises:
        RequestError: a variable that should be passed on is not there.
    """
    return passed_on(config.env, caller, "env")


def runtime_env_of(config: TrainJobConfig, caller: Mapping[str, str]) -> dict[str, Any]:
    """What a job's processes need beside Shoal, in Ray's words; see env_of."""
    variables = env_of(config, caller)
    return ({"env_vars": variables} if variables else {}) | ({"pip": list(config.pip)} if config.pip else {})
