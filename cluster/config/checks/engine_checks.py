"""What is wrong with a job that another engine steps."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from cluster.config.checks.ground import MistakeReport
from cluster.config.reading.deepspeed_settings import contradictions, misplaced, read_deepspeed
from cluster.config.sections.parallel import ParallelConfig
from cluster.config.sections.train import TrainJobConfig

_OWN_TO_TORCH = ("strategy", "tensor", "context", "shard", "offload", "activation_checkpointing", "compile")
"""Keys of `parallel` that torch's engine reads, and DeepSpeed does not."""


def check_engine(job: TrainJobConfig, report: MistakeReport) -> None:
    """Report every mistake; relative paths have been resolved, and the DeepSpeed config been read."""
    parallel = job.parallel
    if parallel.engine == "torch":
        if parallel.deepspeed is not None:
            message = "has a meaning under parallel.engine deepspeed only, not under torch"
            report("parallel.deepspeed", parallel.deepspeed, message, "parallel.engine")
        return
    if find_spec("deepspeed") is None:  # only looked for, not imported: validation answers at once
        report("parallel.engine", "deepspeed", "needs DeepSpeed: pip install 'shoal[deepspeed]'")
    _check_keys(job, report)
    settings = _settings(parallel, report)
    if settings is not None:
        _check_settings(settings, job, report)


def _check_keys(job: TrainJobConfig, report: MistakeReport) -> None:
    """Keys that DeepSpeed has no use for, or cannot follow."""
    parallel, workers = job.parallel, job.workers
    for name in _OWN_TO_TORCH:
        value = getattr(parallel, name)
        if value != ParallelConfig.model_fields[name].get_default():
            message = (
                f"has no effect under parallel.engine deepspeed, whose config says it; was {_shown(value)}"
            )
            report(f"parallel.{name}", value, message, "parallel.engine")
    if job.task == "causal_lm" and not job.data.packing:
        message = (
            "should be true under parallel.engine deepspeed, which averages over samples: those that are "
            "padded count unequally; was false"
        )
        report("data.packing", False, message, "parallel.engine")
    if workers.most > workers.min:
        message = (
            f"should be workers.min ({workers.min}) under parallel.engine deepspeed, whose optimizer state "
            f"fits the number of workers that it was made for; was {workers.most}"
        )
        report("workers.max", workers.most, message, "workers.min", "parallel.engine")


def _settings(parallel: ParallelConfig, report: MistakeReport) -> dict[str, Any] | None:
    given = parallel.deepspeed
    if isinstance(given, dict):
        return given
    if not isinstance(given, str):
        was = "" if given is None else f"; was {given}"
        message = f"should be a DeepSpeed config: a mapping, or the path of its JSON file{was}"
        report("parallel.deepspeed", given, message, "parallel.engine")
        return None
    try:
        return read_deepspeed(given)
    except ValueError as error:
        report("parallel.deepspeed", given, f"`{given}` {error}")
        return None


def _check_settings(settings: dict[str, Any], job: TrainJobConfig, report: MistakeReport) -> None:
    key = "parallel.deepspeed"
    if "scheduler" in settings:
        message = "should have no `scheduler`: the learning rate follows optimizer.schedule"
        report(key, settings["scheduler"], message)
    for section, given in misplaced(settings, job):
        report(key, given, f"should have a mapping as its `{section}`, was {_shown(given)}")
    for each, given in contradictions(settings, job, job.workers.min):
        name = ".".join(each.path)
        message = (
            f"says {name}: {_shown(given)}, the job {_shown(each.value)} ({each.key}); `auto` takes the job's"
        )
        uses = ("batch", "workers", "optimizer", "precision")
        report(key, given, message, *uses)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
