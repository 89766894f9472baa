"""Whoever follows a batch job that has lost its head, and every process of the cluster with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.errors import ShoalError
from cluster.hosts.slurm import following
from cluster.hosts.slurm.batch_job import BatchJob
from cluster.hosts.slurm.following import Following

SQUEUE = """#!/bin/sh
[ -e {directory}/cancelled ] && exit 0
[ -e {directory}/requeued ] && nodes='n[1-2]' || nodes=n2
echo "RUNNING|None|2026-01-01T00:00:00|$nodes"
"""
SCONTROL = """#!/bin/sh
case "$1" in
    requeue) echo $2 >> {directory}/requeued ;;
    show) [ "$3" = n2 ] && echo n2 || {{ echo n1; echo n2; }} ;;
esac
"""
SCANCEL = """#!/bin/sh
echo $1 >> {directory}/cancelled
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Slurm whose job 7 has n1 and n2 only once it was requeued; the directory of what it was told."""
    for name, text in (("squeue", SQUEUE), ("scontrol", SCONTROL), ("scancel", SCANCEL)):
        program = tmp_path / name
        program.write_text(text.format(directory=tmp_path))
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(following, "HEADLESS_S", 1.0)
    return tmp_path


def job_that_was_up(*, requeue: bool) -> BatchJob:
    section = {"name": "lab", "provider": "slurm", "storage": "/storage", "slurm": {"requeue": requeue}}
    job = BatchJob("lab", "mark", "/shoal.yaml", section, "7")
    job.write()
    job.enter("up", head="n1")
    return job


def test_it_goes_back_into_the_queue_and_is_followed_there(slurm: Path) -> None:
    said: list[str] = []
    phase = Following(job_that_was_up(requeue=True), said.append).until_up()
    assert phase.facts["head"] == "n1"
    assert (slurm / "requeued").read_text() == "7\n"
    assert said == ["Slurm's job 7 has lost n1, its head, and nothing runs on n2"]


def test_one_that_is_not_to_come_back_is_ended(slurm: Path) -> None:
    with pytest.raises(ShoalError, match="Slurm's job 7 has ended"):
        Following(job_that_was_up(requeue=False), lambda text: None).until_up()
    assert (slurm / "cancelled").read_text() == "7\n"
    assert not (slurm / "requeued").exists()
