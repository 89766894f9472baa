"""Slurm's commands, whose controller may be away at the moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.errors import ShoalError
from cluster.hosts.slurm import slurm_commands as slurm

SQUEUE = """#!/bin/sh
echo . >> {asked}
if [ $(wc -l < {asked}) -le {times} ]; then
    echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2
    exit 1
fi
echo 'RUNNING|None|2026-01-01T00:00:00|n[1-2]'
"""


def squeue(directory: Path, times: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A squeue whose controller does not answer so many times; the file with a line for each time."""
    asked = directory / "asked"
    program = directory / "squeue"
    program.write_text(SQUEUE.format(asked=asked, times=times))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=":")
    monkeypatch.setattr(slurm, "AGAIN_S", 0.01)
    return asked


def test_a_controller_that_is_restarted_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = squeue(tmp_path, 3, monkeypatch)
    entry = slurm.insist(lambda: slurm.in_queue("7"))
    assert entry is not None
    assert (entry.state, entry.nodes, asked.read_text().count("\n")) == ("RUNNING", "n[1-2]", 4)


def test_one_that_stays_away_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue(tmp_path, 1000, monkeypatch)
    with pytest.raises(ShoalError, match="Unable to contact slurm controller"):
        slurm.insist(lambda: slurm.in_queue("7"), 0.1)
