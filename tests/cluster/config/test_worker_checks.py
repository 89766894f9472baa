"""Workers that cannot be had, and devices that nobody would use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.config.config_files import load, mistakes

NODES = "cluster: {nodes: [{name: big, cpus: 4, gpus: 16, count: 2}, {name: small, cpus: 1, gpus: 4}]}\n"


def text(job: str) -> str:
    return f"{NODES}train_jobs: {{j: {{{job}}}}}\n"


@pytest.mark.parametrize(
    ("job", "key", "words"),
    [
        (
            "workers: {gpus: 8}",
            "workers.gpus",
            "should be 1: under task causal_lm a worker is one process with one GPU, and 7 GPUs of each would"
            " idle; 8 workers use them all",
        ),
        ("workers: {min: 2, max: 1}", "workers.max", "at least workers.min (2)"),
        (
            "workers: {min: 4, max: 4, per_node: 2, cpus: 1}, parallel: {strategy: fsdp, tensor: 4}",
            "workers.per_node",
            "should be a multiple of parallel.tensor (4), was 2",
        ),
        (
            "workers: {min: 2, max: 4, per_node: 2}",
            "workers.per_node",
            "has no meaning for replica groups, each of which is placed by itself",
        ),
        (
            "workers: {min: 8, max: 8, per_node: 4, gpus: 1}, batch: {global: 64}",
            None,
            "",
        ),
        (
            "workers: {min: 12, max: 12, per_node: 4, cpus: 0, gpus: 1}, batch: {global: 96}",
            None,
            "",
        ),
        (
            "workers: {min: 16, max: 16, per_node: 4, cpus: 0, gpus: 1}, batch: {global: 128}",
            "workers.min",
            "16 workers of 1 GPU each cannot be placed: the nodes big × 2 (4 CPUs and 16 GPUs), small (1 CPU"
            " and 4 GPUs) hold 12 of them, 4 workers on each node (workers.per_node)",
        ),
    ],
)
def test_numbers_of_workers(tmp_path: Path, job: str, key: str | None, words: str) -> None:
    if key is None:
        load(tmp_path, text(job))
        return
    (found,) = mistakes(tmp_path, text(job))
    assert found.path == f"train_jobs.j.{key}"
    assert words in found.message


def test_a_process_that_takes_several_devices_may_have_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    load(tmp_path, text("task: script, script: train.py, workers: {gpus: 8}"))
    load(tmp_path, text("workers: {gpus: 8}, parallel: {strategy: data_parallel}"))
