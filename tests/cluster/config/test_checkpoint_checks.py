"""Which checkpoint is the best: what a job can tell, and what it cannot, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.config.config_files import load, mistakes, position

IMAGES = "task: image_classification, "
OWN = "task: 'mine:Task', "


def text(job: str) -> str:
    return f"train_jobs:\n  j: {{{job}}}\n"


@pytest.mark.parametrize(
    ("job", "greater"),
    [
        ("checkpoint: {keep_best: 1}", False),
        ("checkpoint: {keep_best: 2, metric: perplexity}, publish: m, publish_best: true", False),
        (IMAGES + "checkpoint: {keep_best: 1, metric: accuracy}", True),
        (IMAGES + "checkpoint: {keep_best: 1, metric: accuracy, greater_is_better: true}", True),
        (OWN + "checkpoint: {keep_best: 1, metric: f1, greater_is_better: true}", True),
        (OWN + "checkpoint: {keep_best: 1, metric: error_rate, greater_is_better: false}", False),
        ("checkpoint: {keep_best: 1, every_steps: 20}, evaluate: {every_steps: 10}", False),
        ("checkpoint: {metric: anything}, evaluate: {every_steps: null}", False),
    ],
)
def test_the_direction_is_that_of_the_metric(job: str, greater: bool, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Task:\n    build = samples = loss = None\n")
    config = load(tmp_path, text(job)).config.train_jobs["j"]
    assert config.checkpoint.prefers_greater is greater


@pytest.mark.parametrize(
    ("job", "marker", "path", "words"),
    [
        (
            "checkpoint: {keep_best: 1, metric: accuracy}",
            "accuracy",
            "checkpoint.metric",
            "should be a metric that causal_lm has (loss, perplexity), was accuracy",
        ),
        (
            OWN + "checkpoint: {keep_best: 1, metric: f1}",
            "keep_best",
            "checkpoint.greater_is_better",
            "should say whether a greater `f1` is better",
        ),
        (
            IMAGES + "checkpoint: {keep_best: 1, metric: accuracy, greater_is_better: false}",
            "false",
            "checkpoint.greater_is_better",
            "should be true: of accuracy the greater is the better",
        ),
        (
            "checkpoint: {keep_best: 1, greater_is_better: true}",
            "true",
            "checkpoint.greater_is_better",
            "should be false: of loss the smaller is the better",
        ),
        (
            "checkpoint: {keep_best: 3}, evaluate: {every_steps: null}",
            "3",
            "checkpoint.keep_best",
            "needs evaluations to tell the best; evaluate.every_steps is null",
        ),
        (
            "checkpoint: {keep_best: 1, every_steps: 25}, evaluate: {every_steps: 10}",
            "25",
            "checkpoint.every_steps",
            "should be a multiple of evaluate.every_steps (10)",
        ),
        ("publish: m, publish_best: true", "true", "publish_best", "needs checkpoint.keep_best"),
        ("checkpoint: {keep_best: 1}, publish_best: true", "true", "publish_best", "needs publish"),
    ],
)
def test_what_cannot_tell_the_best_is_said_at_its_place(
    job: str, marker: str, path: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("class Task:\n    build = samples = loss = None\n")
    content = text(job)
    (found,) = mistakes(tmp_path, content)
    assert found.path == f"train_jobs.j.{path}"
    assert words in found.message
    if found.given is not None:
        assert (found.line, found.column) == position(content, marker)
