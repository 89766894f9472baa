"""What is wrong with a training job once its sections, the nodes and the files are seen together."""

from __future__ import annotations

from pathlib import Path

from cluster.config.ground import NODES, PYTHON_STDLIB, Ground, Reporter, path_problem, resources
from cluster.config.model_sizes import ModelDirectoryError, read_sizes
from cluster.config.train_section import TrainJobConfig, WorkersConfig

_SHOWN_SIZES = 8


def check_job(job: TrainJobConfig, ground: Ground, report: Reporter) -> None:
    """Report every mistake of one job; its paths are absolute."""
    _check_model(job, report)
    _check_data(job, report)
    if job.workers.most < job.workers.min:
        message = f"should be at least workers.min ({job.workers.min}), was {job.workers.most}"
        report("workers.max", job.workers.max, message, "workers.min")
    _check_batch(job, report)
    _check_room(job.workers, ground, report)
    if job.optimizer.warmup_steps > job.steps:
        message = f"should be at most steps ({job.steps}), was {job.optimizer.warmup_steps}"
        report("optimizer.warmup_steps", job.optimizer.warmup_steps, message, "steps")


def _check_model(job: TrainJobConfig, report: Reporter) -> None:
    model = job.model
    longest: int | None = model.max_position_embeddings
    if model.directory is not None:
        try:
            longest = read_sizes(Path(model.directory)).context_length
        except ModelDirectoryError as error:
            report("model.directory", model.directory, f"`{model.directory}` {error}")
            longest = None
    else:
        if model.hidden_size % model.num_heads:
            message = f"should be a multiple of num_heads ({model.num_heads}), was {model.hidden_size}"
            report("model.hidden_size", model.hidden_size, message, "model.num_heads", "model.directory")
        if model.num_heads % model.kv_heads:
            message = f"should divide num_heads ({model.num_heads}), was {model.kv_heads}"
            report("model.num_kv_heads", model.num_kv_heads, message, "model.num_heads", "model.directory")
    if longest is not None and job.data.sequence_length > longest:
        limit = f"the model's max_position_embeddings ({longest})"
        message = f"should be at most {limit}, was {job.data.sequence_length}"
        uses = ("model.max_position_embeddings", "model.directory")
        report("data.sequence_length", job.data.sequence_length, message, *uses)


def _check_data(job: TrainJobConfig, report: Reporter) -> None:
    if job.data.source != PYTHON_STDLIB:
        problem = path_problem(job.data.source)
        if problem is not None:
            message = (
                f"`{job.data.source}` {problem}; it should be {PYTHON_STDLIB}, or a Parquet file or directory"
            )
            report("data.source", job.data.source, message)
    if job.data.tokenizer is not None:
        problem = path_problem(job.data.tokenizer)
        if problem is not None:
            report("data.tokenizer", job.data.tokenizer, f"`{job.data.tokenizer}` {problem}")


def _check_batch(job: TrainJobConfig, report: Reporter) -> None:
    whole, micro, workers = job.batch.global_size, job.batch.micro, job.workers
    if whole % micro:
        message = f"should be a multiple of batch.micro ({micro}) × workers, was {whole}"
        report("batch.global", whole, message, "batch.micro")
        return
    sizes = uneven_sizes(whole // micro, workers)
    if sizes:
        shown = ", ".join(map(str, sizes[:_SHOWN_SIZES])) + (", …" if len(sizes) > _SHOWN_SIZES else "")
        between = str(workers.min) if workers.min == workers.most else f"{workers.min} to {workers.most}"
        message = (
            f"should be a multiple of batch.micro ({micro}) × workers at every number of workers ({between});"
            f" {whole} is none at {shown}"
        )
        report("batch.global", whole, message, "batch.micro", "workers.min", "workers.max")


def uneven_sizes(micro_batches: int, workers: WorkersConfig) -> list[int]:
    """The numbers of workers in the range that cannot share the micro-batches evenly (the first few)."""
    sizes: list[int] = []
    for size in range(workers.min, workers.most + 1):
        if micro_batches % size:
            sizes.append(size)
        # All sizes beyond the number of micro-batches are uneven: a huge range needs no walk.
        if len(sizes) > _SHOWN_SIZES:
            break
    return sizes


def _check_room(workers: WorkersConfig, ground: Ground, report: Reporter) -> None:
    room = ground.holds(workers.cpus, workers.gpus)
    if room is None or room >= workers.min:
        return
    need = resources(workers.cpus, workers.gpus)
    wants = f"{workers.min} workers of {need} each" if workers.min > 1 else f"a worker of {need}"
    has = f"{room} of them" if room else "none"
    message = (
        f"{wants} cannot be placed: the nodes {ground.describe()} hold {has}, one worker wholly on one node"
    )
    report("workers.min", workers.min, message, "workers.cpus", "workers.gpus", NODES)
