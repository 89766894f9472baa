"""What is asked of the simulated cluster: training jobs; plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Job:
    """One training job, as somebody submitted it.

    Attributes:
        submit_s: seconds from the trace's start.
        duration_s: how long it computes at the size that was asked for, without waiting and start-up.
        group: devices of one replica group, which come and go together.
        groups: groups that were asked for; `duration_s` is with so many.
        min_groups: fewest with which it runs. Equal to `max_groups`: the job is not elastic.
        tensor: devices that must be on one node (a tensor-parallel group); divides `group`.
        priority: among jobs, the greater goes first.
        accelerator: the only kind of node that will do; None for any.
    """

    name: str
    submit_s: float
    duration_s: float
    group: int
    groups: int = 1
    min_groups: int = 1
    max_groups: int = 1
    tensor: int = 1
    priority: int = 0
    user: str = ""
    accelerator: str | None = None

    @property
    def devices(self) -> int:
        """Devices that were asked for."""
        return self.group * self.groups

    @property
    def elastic(self) -> bool:
        return self.min_groups < self.max_groups


@dataclass(frozen=True)
class Trace:
    """Jobs in the order in which they were submitted, and where they come from.

    Attributes:
        left_out: sentences about what of the source is not in it, and why.
    """

    jobs: tuple[Job, ...]
    source: str
    left_out: tuple[str, ...] = ()

    @property
    def span_s(self) -> float:
        """From the start to the last submission."""
        return self.jobs[-1].submit_s if self.jobs else 0.0

    @property
    def device_seconds(self) -> float:
        """What all jobs compute at the sizes that were asked for."""
        return sum(job.devices * job.duration_s for job in self.jobs)


def in_order(jobs: Sequence[Job]) -> tuple[Job, ...]:
    """By time of submission; those of one moment as they stood."""
    return tuple(sorted(jobs, key=lambda job: job.submit_s))


def stretched(job: Job) -> Job:
    """The job, elastic between half and twice the devices that were asked for.

    Its replica group is half of what was asked for (one device, if that is one), and it runs with 1 to 4 of
    them (one device: 1 or 2). That is an assumption: no published trace says how far its jobs would stretch.
    """
    group = max(1, job.devices // 2)
    if job.devices % group:
        return job
    groups = job.devices // group
    tensor = job.tensor if group % job.tensor == 0 else 1
    return replace(job, group=group, groups=groups, min_groups=1, max_groups=2 * groups, tensor=tensor)
