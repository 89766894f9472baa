"""What is wrong with a training job once its sections, the nodes and the files are seen together."""

from __future__ import annotations

from cluster.config.ground import PYTHON_STDLIB, Ground, Reporter, path_problem
from cluster.config.model_sizes import ModelDirectoryError, ModelSizes, sizes_of_job
from cluster.config.parallel_checks import check_parallel
from cluster.config.train_section import TrainJobConfig


def check_job(job: TrainJobConfig, ground: Ground, report: Reporter) -> None:
    """Report every mistake of one job; its paths are absolute."""
    sizes = _check_model(job, report)
    _check_data(job, report)
    check_parallel(job, sizes, ground, report)
    _check_schedule(job, report)


def _check_model(job: TrainJobConfig, report: Reporter) -> ModelSizes | None:
    """Returns the model's sizes, None where they cannot be known."""
    model = job.model
    try:
        sizes = sizes_of_job(model)
    except ModelDirectoryError as error:
        report("model.directory", model.directory, f"`{model.directory}` {error}")
        return None
    if model.directory is None:
        if model.hidden_size % model.num_heads:
            message = f"should be a multiple of num_heads ({model.num_heads}), was {model.hidden_size}"
            report("model.hidden_size", model.hidden_size, message, "model.num_heads", "model.directory")
        if model.num_heads % model.kv_heads:
            message = f"should divide num_heads ({model.num_heads}), was {model.kv_heads}"
            report("model.num_kv_heads", model.num_kv_heads, message, "model.num_heads", "model.directory")
    longest = sizes.context_length
    if longest is not None and job.data.sequence_length > longest:
        limit = f"the model's max_position_embeddings ({longest})"
        message = f"should be at most {limit}, was {job.data.sequence_length}"
        uses = ("model.max_position_embeddings", "model.directory")
        report("data.sequence_length", job.data.sequence_length, message, *uses)
    return sizes


def _check_data(job: TrainJobConfig, report: Reporter) -> None:
    if job.data.source != PYTHON_STDLIB:
        problem = path_problem(job.data.source)
        if problem is not None:
            message = (
                f"`{job.data.source}` {problem}; it should be {PYTHON_STDLIB}, or a Parquet file or directory"
            )
            report("data.source", job.data.source, message)
    if job.data.group_by_length and job.data.packing:
        report("data.group_by_length", True, "has no effect beside data.packing (true)", "data.packing")
    if job.data.tokenizer is not None:
        problem = path_problem(job.data.tokenizer)
        if problem is not None:
            report("data.tokenizer", job.data.tokenizer, f"`{job.data.tokenizer}` {problem}")


def _check_schedule(job: TrainJobConfig, report: Reporter) -> None:
    optimizer = job.optimizer
    if optimizer.warmup_steps > job.steps:
        message = f"should be at most steps ({job.steps}), was {optimizer.warmup_steps}"
        report("optimizer.warmup_steps", optimizer.warmup_steps, message, "steps")
    elif optimizer.decay_steps is not None and optimizer.warmup_steps + optimizer.decay_steps > job.steps:
        left = job.steps - optimizer.warmup_steps
        message = f"should be at most steps - warmup_steps ({left}), was {optimizer.decay_steps}"
        report("optimizer.decay_steps", optimizer.decay_steps, message, "steps", "optimizer.warmup_steps")
