"""What a rank notes of how its job is done, which people read at the start of each attempt."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cluster.config.sections.train import TrainJobConfig
from infra.job_view import sentence
from tests.train_jobs.ranks import assemble, run_program, tiny_job, write_corpus
from train_jobs.data.preparation import prepare_data
from train_jobs.elastic.replicas import ReplicaQuorum
from train_jobs.rank.assembly import RankAssembly


def write_notes(config_json: str, run: str) -> None:
    notes = assemble(TrainJobConfig.model_validate_json(config_json), Path(run)).notes
    (Path(run) / "notes.json").write_text(json.dumps(notes))


@pytest.mark.parametrize(
    ("warmup_steps", "noted"),
    [
        (8, []),
        (9, ["optimizer.warmup_steps: 8 instead of 9, since the job has no more steps"]),
    ],
)
def test_a_warm_up_that_is_cut_to_the_steps_of_the_job_is_told(
    warmup_steps: int, noted: list[str], tmp_path: Path
) -> None:
    corpus = write_corpus(tmp_path / "corpus.parquet")
    config = tiny_job(corpus, steps=8, optimizer={"warmup_steps": warmup_steps})
    prepare_data(config, tmp_path / "data")
    run_program(write_notes, tmp_path, 1, config.model_dump_json(), str(tmp_path))
    notes = json.loads((tmp_path / "notes.json").read_text())
    assert [note for note in notes if "warmup_steps" in note] == noted
    started = {"kind": "started", "attempt": 1, "world_size": 1, "step": 0, "notes": notes}
    assert (sentence(started) or "").splitlines()[1:] == notes


@pytest.mark.parametrize(
    ("device", "grouped", "noted"), [("cuda", True, 1), ("cuda", False, 0), ("cpu", True, 0)]
)
def test_of_replica_groups_on_gpus_it_is_said_that_nobody_has_run_them(
    device: str, grouped: bool, noted: int
) -> None:
    assembly = SimpleNamespace(
        config=TrainJobConfig(),
        parallel=SimpleNamespace(notes=()),
        quorum=object.__new__(ReplicaQuorum) if grouped else None,
        mesh=SimpleNamespace(device=torch.device(device)),
    )
    notes = RankAssembly.notes.fget(assembly)  # type: ignore[attr-defined]
    assert len([note for note in notes if "not run on GPUs" in note]) == noted
