"""What is wrong with a training job once its sections, the nodes and the files are seen together."""

from __future__ import annotations

from pathlib import Path

from cluster.config.checks.checkpoint_checks import check_checkpoints
from cluster.config.checks.data_checks import check_data
from cluster.config.checks.engine_checks import check_engine
from cluster.config.checks.ground import Ground, MistakeReport, path_problem
from cluster.config.checks.parallel_checks import check_parallel
from cluster.config.checks.recovery_checks import check_recovery
from cluster.config.checks.script_checks import check_script, folder_problem
from cluster.config.checks.worker_checks import check_room, check_workers
from cluster.config.models.model_files import directory_lacks, tokenizer_problem
from cluster.config.models.model_sizes import ModelDirectoryError, ModelSizes, sizes_of_job
from cluster.config.reading.custom_task import task_problem
from cluster.config.sections.model import IMAGE_SIZES, TEXT_SIZES, ModelConfig
from cluster.config.sections.train import ARCHITECTURES, TrainJobConfig
from cluster.models.directory_here import is_uri

_IDLE_SIZES = {"causal_lm": IMAGE_SIZES, "image_classification": TEXT_SIZES}
"""By task: the keys of `model` that it has no use for."""


def check_job(job: TrainJobConfig, ground: Ground, report: MistakeReport) -> None:
    """Report every mistake of one job; its paths are absolute, but those that travel."""
    folder = job.folder(ground.base)
    problem = None if job.working_dir is None else folder_problem(folder)
    if problem is not None:
        report("working_dir", job.working_dir, f"`{job.working_dir}` {problem}")
        folder = ground.base
    check_script(job, folder, report)
    if job.task == "script":
        check_workers(job, report)
        check_room(job, ground.with_accelerator(job.accelerator, report), report)
        return
    _check_task(job, folder, report)
    sizes = _check_model(job, report)
    check_data(job, report)
    check_parallel(job, sizes, ground.with_accelerator(job.accelerator, report), report)
    check_engine(job, report)
    check_recovery(job, report)
    check_checkpoints(job, report)
    _check_schedule(job, report)


def _check_task(job: TrainJobConfig, folder: Path, report: MistakeReport) -> None:
    """What belongs to another task."""
    where = f"under task {job.task}"
    if job.settings and not job.is_custom:
        report("settings", job.settings, f"is for tasks of yours (`your.module:Task`), not {where}", "task")
    if job.is_custom:
        problem = task_problem(job.task, folder)
        if problem is not None:
            report("task", job.task, problem)
    wanted = ARCHITECTURES.get(job.task)
    if wanted is not None and job.architecture != wanted:
        message = f"should be {wanted} {where}, was {job.model.architecture}"
        report("model.architecture", job.model.architecture, message, "task")
    for name in _IDLE_SIZES.get(job.task, ()):
        value = getattr(job.model, name)
        if value != ModelConfig.model_fields[name].get_default():
            report(f"model.{name}", value, f"has no effect {where}", "task")


def _check_model(job: TrainJobConfig, report: MistakeReport) -> ModelSizes | None:
    """Returns the sizes of a language model, None where they cannot be known."""
    model = job.model
    if model.directory is not None and is_uri(model.directory):
        _check_directories(job, report)
        return None  # what lies elsewhere is not looked at
    try:
        sizes = sizes_of_job(model)
    except ModelDirectoryError as error:
        report("model.directory", model.directory, f"`{model.directory}` {error}")
        return None
    _check_directories(job, report)
    if job.task == "image_classification" and len(model.hidden_sizes) != len(model.depths):
        message = (
            f"should be as many as model.hidden_sizes ({len(model.hidden_sizes)}), was {len(model.depths)}"
        )
        report("model.depths", model.depths, message, "model.hidden_sizes")
    if job.task != "causal_lm":
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


def _check_directories(job: TrainJobConfig, report: MistakeReport) -> None:
    """The model that training starts from, and the tokenizer."""
    directory, tokenizer = job.model.directory, job.data.tokenizer
    if directory is not None and not job.is_custom and not is_uri(directory):
        lacks = directory_lacks(Path(directory), tokenizer=job.task == "causal_lm" and tokenizer is None)
        if lacks is not None:
            report("model.directory", directory, f"`{directory}` {lacks}", "task", "data.tokenizer")
    if tokenizer is not None and not is_uri(tokenizer):
        # A task of the user's may read it in its own way.
        problem = path_problem(tokenizer) if job.is_custom else tokenizer_problem(Path(tokenizer))
        if problem is not None:
            report("data.tokenizer", tokenizer, f"`{tokenizer}` {problem}")


def _check_schedule(job: TrainJobConfig, report: MistakeReport) -> None:
    optimizer = job.optimizer
    warmup_steps = min(optimizer.warmup_steps, job.steps)  # a short trial of a job should just work
    if optimizer.decay_steps is not None and warmup_steps + optimizer.decay_steps > job.steps:
        left = job.steps - warmup_steps
        message = f"should be at most steps - warmup_steps ({left}), was {optimizer.decay_steps}"
        report("optimizer.decay_steps", optimizer.decay_steps, message, "steps", "optimizer.warmup_steps")
