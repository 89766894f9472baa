"""Whether the workers of a job can be had: their number, what each takes, and the nodes' room."""

from __future__ import annotations

from cluster.config.checks.ground import NODES, Ground, MistakeReport, resources
from cluster.config.sections.train import TrainJobConfig
from cluster.wording import counted


def check_workers(job: TrainJobConfig, report: MistakeReport) -> None:
    """Report numbers of workers that do not agree, and devices that nobody would use."""
    workers = job.workers
    if workers.most < workers.min:
        message = f"should be at least workers.min ({workers.min}), was {workers.most}"
        report("workers.max", workers.max, message, "workers.min")
    if job.task != "script" and workers.gpus > 1 and job.parallel.strategy != "data_parallel":
        message = (
            f"should be 1: under task {job.task} a worker is one process with one GPU, and"
            f" {counted(workers.gpus - 1, 'GPU')} of each would idle; {workers.gpus} workers use them all"
        )
        report("workers.gpus", workers.gpus, message, "task", "parallel.strategy")
    size = workers.per_node
    if size is None:
        return
    if job.group_size is not None:
        message = "has no meaning for replica groups, each of which is placed by itself"
        uses = ("workers.group", "workers.min", "workers.max", "parallel.strategy", "parallel.engine")
        report("workers.per_node", size, message, *uses)
        return
    if size % job.parallel.tensor:
        message = f"should be a multiple of parallel.tensor ({job.parallel.tensor}), was {size}"
        report("workers.per_node", size, message, "parallel.tensor")
    for key in ("min", "max"):
        number = getattr(workers, key)
        if number is not None and number % size:
            message = f"should be a multiple of workers.per_node ({size}), was {number}"
            report(f"workers.{key}", number, message, "workers.per_node")


def check_room(job: TrainJobConfig, ground: Ground, report: MistakeReport) -> None:
    """Report it where the nodes do not hold the least number of workers."""
    workers, unit = job.workers, job.unit_size
    apart = workers.per_node is not None
    room = ground.holds(workers.cpus * unit, workers.gpus * unit, apart=apart)
    if room is None or room * unit >= workers.min or workers.min % unit:
        return
    need = resources(workers.cpus, workers.gpus)
    wants = f"{workers.min} workers of {need} each" if workers.min > 1 else f"a worker of {need}"
    has = f"{room * unit} of them" if room else "none"
    if apart:
        wholly = f"{counted(unit, 'worker')} on each node (workers.per_node)"
    else:
        one = "one worker" if unit == 1 else f"the {unit} tensor-parallel workers of a group"
        wholly = f"{one} wholly on one node"
    message = f"{wants} cannot be placed: the nodes {ground.describe()} hold {has}, {wholly}"
    uses = ("workers.cpus", "workers.gpus", "workers.per_node", "parallel.tensor", "accelerator", NODES)
    report("workers.min", workers.min, message, *uses)
