"""A job that goes on with another config: which samples it takes then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from cluster.config.sections.train import TrainJobConfig
from tests.train_jobs.data.test_images import bmp, write_images
from tests.train_jobs.ranks import finish, reports, some_steps, start_program
from train_jobs.data.preparation import prepare_data
from train_jobs.spec import DATA

TASK = Path(__file__).parents[2] / "integration" / "sampled_task.py"
SAMPLES = 64


def job(directory: Path, **changes: Any) -> TrainJobConfig:
    settings = {"samples": SAMPLES, "log": str(directory), "pause_s": 0.0}
    return TrainJobConfig.model_validate(
        {
            "task": "sampled_task:Task",
            "settings": settings,
            "steps": 100,
            "batch": {"global": 4, "micro": 2},
            "checkpoint": {"every_steps": 100},
            "evaluate": {"every_steps": None},
            **changes,
        }
    )


def taken(directory: Path, run: Path, config: TrainJobConfig, until: int, attempt: int) -> list[int]:
    """The samples of an attempt, in the order in which its one rank took them."""
    for log in directory.glob("*.jsonl"):
        log.unlink()
    shutil.copy(TASK, directory)
    arguments = (str(directory), config.model_dump_json(), str(run), until, attempt)
    finish(start_program(some_steps, run, 1, *arguments))
    (log,) = directory.glob("*.jsonl")
    batches = [json.loads(line) for line in log.read_text().splitlines()]
    return [sample for batch in batches for sample in batch]


def begun_anew(run: Path) -> list[int]:
    return [line["step"] for line in reports(run) if line.get("kind") == "data_begun_anew"]


def test_another_global_batch_takes_up_where_the_last_one_ended(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    samples = taken(tasks, run, job(tasks), 5, 1)
    samples += taken(tasks, run, job(tasks, batch={"global": 12, "micro": 2}), 7, 2)
    samples += taken(tasks, run, job(tasks, batch={"global": 2, "micro": 1}), 17, 3)
    assert len(samples) == 5 * 4 + 2 * 12 + 10 * 2 == SAMPLES
    assert sorted(samples) == list(range(SAMPLES)), "an epoch has every sample once"
    assert begun_anew(run) == []


def test_another_order_or_other_samples_begin_anew_and_are_said(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    first = taken(tasks, run, job(tasks), 4, 1)
    other = taken(tasks, run, job(tasks, seed=9), 8, 2)
    assert begun_anew(run) == [4]
    same = taken(tasks, run, job(tasks, seed=9), 20, 3)
    assert begun_anew(run) == [4], "once"
    assert sorted(other + same) == list(range(SAMPLES))
    assert other != first
    fewer = {"samples": 32, "log": str(tasks), "pause_s": 0.0}
    fresh = taken(tasks, run, job(tasks, seed=9, settings=fewer), 28, 4)
    assert begun_anew(run) == [4, 20]
    assert sorted(fresh) == list(range(32))


def test_another_source_of_images_begins_anew_and_is_said(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def train(source: Path, until: int, attempt: int) -> None:
        config = TrainJobConfig.model_validate(
            {
                "task": "image_classification",
                "model": {"embedding_size": 4, "hidden_sizes": [4], "depths": [1]},
                "data": {"source": str(source), "image_column": "img", "held_out_every": 4},
                "steps": 100,
                "batch": {"global": 4, "micro": 2},
                "checkpoint": {"every_steps": 100},
                "evaluate": {"every_steps": None},
            }
        )
        prepare_data(config, run / DATA)
        arguments = (str(tmp_path), config.model_dump_json(), str(run), until, attempt)
        finish(start_program(some_steps, run, 1, *arguments))

    pixels = np.random.default_rng(0).integers(0, 256, (2, 20, 8, 8), dtype=np.uint8)
    labels = [index % 10 for index in range(20)]
    images = [[bmp(each) for each in part] for part in pixels]
    first, other = (tmp_path / name for name in ("first", "other"))
    for directory, part in ((first, images[0]), (other, images[1])):
        directory.mkdir()
        write_images(directory / "train.parquet", part, labels)
    train(first, 2, 1)
    train(first.rename(tmp_path / "moved"), 4, 2)
    assert begun_anew(run) == [], "they have only been moved"
    train(other, 6, 3)
    assert begun_anew(run) == [4]
