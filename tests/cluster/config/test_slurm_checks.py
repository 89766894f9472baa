"""The section `slurm`: what sbatch would take, and nothing that would make another job of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config.loader import load_config
from cluster.config.sections.slurm import seconds_of
from tests.cluster.config.config_files import mistakes, write

SLURM = "cluster: {provider: slurm, storage: /data, slurm: {%s}}\n"


@pytest.mark.parametrize(
    ("slurm", "path", "words"),
    [
        ("nodes: 0", "cluster.slurm.nodes", "at least 1"),
        ("time: soon", "cluster.slurm.time", "should be a time as sbatch takes it"),
        ("time: '10:00:00:00'", "cluster.slurm.time", "should be a time as sbatch takes it"),
        ("notice_s: 5", "cluster.slurm.notice_s", "at least 10"),
        ("extra: [qos=high]", "cluster.slurm.extra.0", "should be an option of sbatch"),
        ("extra: ['--a\\nb']", "cluster.slurm.extra.0", "should be an option of sbatch"),
        ("extra: [--nodes=3]", "cluster.slurm.extra.0", "has a key of its own: slurm.nodes"),
        ("extra: [-p, gpu]", "cluster.slurm.extra.0", "has a key of its own: slurm.partition"),
        ("extra: [--array=1-3]", "cluster.slurm.extra.0", "is not for a cluster"),
        ("partition: ''", "cluster.slurm.partition", "should be a name, as Slurm's own commands print it"),
        ("account: 'a b'", "cluster.slurm.account", "should be a name"),
        ("python: python3", "cluster.slurm.python", "should be the path of a Python, from the root"),
    ],
)
def test_what_sbatch_would_not_take(slurm: str, path: str, words: str, tmp_path: Path) -> None:
    found = mistakes(tmp_path, SLURM % slurm)
    assert found[0].path == path
    assert words in found[0].message


@pytest.mark.parametrize("time", ["90", "'90'", "'1:30:00'", "2-12", "2-00:00:00", "UNLIMITED"])
def test_times_as_sbatch_takes_them(time: str, tmp_path: Path) -> None:
    assert load_config(write(tmp_path, SLURM % f"time: {time}")).config.cluster.slurm.time == time.strip("'")


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("1:30:00", 5400),
        ("2-12", 216_000),
        ("2-12:30", 217_800),
        ("1-00:00:01", 86_401),
        ("infinite", None),
    ],
)
def test_times_mean_what_they_mean_to_sbatch(time: str, seconds: int | None) -> None:
    assert seconds_of(time) == seconds


def test_a_time_limit_leaves_time_to_work(tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, SLURM % "time: 4, notice_s: 121")
    assert found.path == "cluster.slurm.time"
    assert "leaves no time to work" in found.message
    assert load_config(write(tmp_path, SLURM % "time: 4, notice_s: 120"))


@pytest.mark.parametrize(
    ("cluster", "path", "words"),
    [
        ("{slurm: {nodes: 2}}", "cluster.slurm", "is for `provider: slurm`"),
        ("{provider: slurm, nodes: [{name: a}]}", "cluster.nodes", "`slurm.nodes` says how many"),
        ("{provider: slurm, ssh: {user: ann}}", "cluster.ssh", "is for `provider: ssh`"),
        ("{provider: slurm, address: 'x:1'}", "cluster.address", "is for `provider: existing`"),
    ],
)
def test_the_keys_of_a_provider_are_for_that_one(cluster: str, path: str, words: str, tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, f"cluster: {cluster}\n")
    assert found.path == path
    assert words in found.message


JOB = "train_jobs: {a: {task: script, script: x.py, workers: {min: %d, max: %d, gpus: 1}}}\n"


def test_jobs_are_checked_against_what_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("")
    asked = SLURM % "nodes: 2, gpus_per_node: 4, cpus_per_node: 16"
    assert load_config(write(tmp_path, asked + JOB % (8, 8)))
    found = mistakes(tmp_path, asked + JOB % (9, 9))
    assert "workers" in found[0].path


def test_of_whole_nodes_nobody_knows_what_they_have(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("")
    assert load_config(write(tmp_path, SLURM % "nodes: 2" + JOB % (9, 9)))
