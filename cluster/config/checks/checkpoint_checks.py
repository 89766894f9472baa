"""Whether a job can tell its best checkpoints from the others."""

from __future__ import annotations

from cluster.config.checks.ground import MistakeReport
from cluster.config.reading.sentences import listed
from cluster.config.sections.train import GREATER_IS_BETTER, TrainJobConfig

METRICS = {"causal_lm": ("loss", "perplexity"), "image_classification": ("loss", "accuracy")}
"""By built-in task: the means of its evaluations."""


def check_checkpoints(job: TrainJobConfig, report: MistakeReport) -> None:
    """Report settings by which no checkpoint, or the wrong one, would be the best."""
    saves = job.checkpoint
    if job.publish_best and not (saves.keep_best and job.publish):
        lacks = "publish" if saves.keep_best else "checkpoint.keep_best"
        report("publish_best", True, f"needs {lacks}", "checkpoint.keep_best", "publish")
    if not saves.keep_best:
        return
    known = METRICS.get(job.task)
    if known is not None and saves.metric not in known:
        message = f"should be a metric that {job.task} has ({listed(known)}), was {saves.metric}"
        report("checkpoint.metric", saves.metric, message, "task")
    better = GREATER_IS_BETTER.get(saves.metric)
    if better is None and saves.greater_is_better is None:
        message = f"should say whether a greater `{saves.metric}` is better; keep_best goes by it"
        report("checkpoint.greater_is_better", None, message, "checkpoint.metric", "checkpoint.keep_best")
    elif better is not None and saves.greater_is_better not in (None, better):
        which = "greater" if better else "smaller"
        message = f"should be {str(better).lower()}: of {saves.metric} the {which} is the better"
        report("checkpoint.greater_is_better", saves.greater_is_better, message, "checkpoint.metric")
    evaluates = job.evaluate.every_steps
    if evaluates is None:
        message = "needs evaluations to tell the best; evaluate.every_steps is null"
        report("checkpoint.keep_best", saves.keep_best, message, "evaluate.every_steps")
    elif saves.every_steps % evaluates:
        message = (
            f"should be a multiple of evaluate.every_steps ({evaluates}), so that keep_best knows the metric "
            f"of every checkpoint; was {saves.every_steps}"
        )
        report("checkpoint.every_steps", saves.every_steps, message, "evaluate.every_steps")
