"""The section `cluster.slurm`: the batch job whose nodes are the cluster's."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from cluster.config.sections.section import Argument, Section

_TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}|infinite|unlimited", re.IGNORECASE)
OWN_OPTIONS = {
    "account": "slurm.account",
    "A": "slurm.account",
    "cpus-per-task": "slurm.cpus_per_node",
    "c": "slurm.cpus_per_node",
    "gpus-per-node": "slurm.gpus_per_node",
    "nodes": "slurm.nodes",
    "N": "slurm.nodes",
    "partition": "slurm.partition",
    "p": "slurm.partition",
    "requeue": "slurm.requeue",
    "no-requeue": "slurm.requeue",
    "signal": "slurm.notice_s",
    "time": "slurm.time",
    "t": "slurm.time",
}
"""Options of sbatch that have a key here, which counts."""
FORBIDDEN_OPTIONS = ("array", "a", "ntasks", "n", "ntasks-per-node", "output", "o", "wrap", "chdir", "D")
"""Those that would make another job of it."""


def _time(value: object) -> str:
    text = str(value)
    if isinstance(value, bool) or _TIME.fullmatch(text) is None:
        raise ValueError(
            "should be a time as sbatch takes it (minutes, HH:MM:SS, D-HH, D-HH:MM:SS; in quotes),"
            f" was {value!r}"
        )
    return text


def _option(value: str) -> str:
    found = re.fullmatch(r"--([a-z][a-z0-9-]*)(=.*)?|-([a-zA-Z])(.*)", value)
    if found is None or "\n" in value:
        raise ValueError(f"should be an option of sbatch (--qos=high, --exclude=node-7), was {value!r}")
    name = found[1] or found[3]
    if name in OWN_OPTIONS:
        raise ValueError(f"{value!r} has a key of its own: {OWN_OPTIONS[name]}")
    if name in FORBIDDEN_OPTIONS:
        raise ValueError(f"{value!r} is not for a cluster: Shoal sets it itself")
    return value


def _slurm_name(value: str) -> str:
    if re.fullmatch(r"[\w.,:+@/-]+", value) is None:
        raise ValueError(f"should be a name, as Slurm's own commands print it, was {value!r}")
    return value


def _python(value: str) -> str:
    if re.fullmatch(r"/[^\n]+", value) is None:
        raise ValueError(f"should be the path of a Python, from the root, was {value!r}")
    return value


SlurmName = Annotated[Argument, AfterValidator(_slurm_name)]
PythonPath = Annotated[str, AfterValidator(_python)]
Time = Annotated[str, BeforeValidator(_time), WithJsonSchema({"type": ["string", "integer"]})]
Option = Annotated[str, AfterValidator(_option)]


def seconds_of(time: str) -> int | None:
    """What a time of sbatch's means; None for one without end."""
    if time.lower() in ("infinite", "unlimited"):
        return None
    days, dash, rest = time.rpartition("-")
    parts = [int(each) for each in rest.split(":")]
    if dash or len(parts) == 3:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:  # without days, and with one colon or none, it begins with minutes
        hours, minutes, seconds = 0, *[*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


class SlurmConfig(Section):
    """What is asked of Slurm for the cluster: one batch job, whose first node is the head."""

    nodes: int = Field(default=1, ge=1, le=200)
    """How many nodes."""
    gpus_per_node: int | None = Field(default=None, ge=0)
    """GPUs of each. Default: sbatch is not asked for any by number (`extra` may: --gres=gpu:h100:4); Ray
    takes those that it finds."""
    cpus_per_node: int | None = Field(default=None, ge=1)
    """CPUs of each. Default: whole nodes, which nobody shares (--exclusive)."""
    partition: SlurmName | None = None
    """Default: the site's."""
    account: SlurmName | None = None
    """Default: the user's."""
    time: Time | None = None
    """Longest run, as sbatch takes it ("2-00:00:00", "90" minutes). Default: the partition's."""
    notice_s: int = Field(default=120, ge=10, le=65535)
    """So many seconds before the time limit, or at the notice of a preemption, jobs save and leave."""
    requeue: bool = True
    """Whether the job goes back into the queue at its time limit, after a preemption and when its head is
    lost; jobs and apps go on when it starts again."""
    python: PythonPath | None = None
    """The Python on each node that has this version of Shoal. Default: the one that `shoal` runs with here,
    by its path."""
    extra: list[Option] = Field(default=[])
    """Further options of sbatch (--qos=high, --gres=gpu:h100:4, --mem=64G)."""
