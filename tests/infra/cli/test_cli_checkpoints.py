"""`shoal checkpoints` and `shoal export`: on the files of a run, with no cluster running."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cluster.files.storage import Storage
from infra.cli.main import call
from tests.train_jobs.ranks import run_ranks, tiny_job, write_corpus
from train_jobs.records.run_config import changes, write_run_config
from train_jobs.records.run_log import RunLog

JOB = "lm-20260101-000000-abcd"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage with a run of two ranks under FSDP, which has checkpoints at steps 4 and 8."""
    directory = tmp_path_factory.mktemp("project")
    (directory / "shoal.yaml").write_text("cluster: {storage: ./kept}\n")
    config = tiny_job(write_corpus(directory / "corpus.parquet"), parallel={"strategy": "fsdp"})
    run = directory / "kept" / "jobs" / JOB
    run_ranks(config, run, 2)
    storage = Storage(directory / "kept")
    write_run_config(storage, JOB, "lm", config)
    RunLog(storage.child("jobs", JOB)).event("2026-01-01T00:00:00Z", "submitted", name="lm", steps=8)
    return directory


@pytest.fixture(autouse=True)
def _inside(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)


def test_checkpoints_are_listed_with_what_is_known_of_them(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["checkpoints", "lm", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["step"], row["complete"], row["damage"]) for row in rows] == [
        (4, True, None),
        (8, True, None),
    ]
    for row in rows:
        files = [file for file in Path(row["path"]).iterdir() if file.name != "committed.json"]
        assert row["size_bytes"] == sum(file.stat().st_size for file in files)
        assert row["evaluation"]["step"] == row["step"]
    assert rows[1]["evaluation"]["loss"] < rows[0]["evaluation"]["loss"]
    assert call(["checkpoints", JOB]) == 0
    assert f"loss {rows[1]['evaluation']['loss']:.4f}" in capsys.readouterr().out
    assert call(["checkpoints", "nobody"]) == 2


@pytest.mark.parametrize(("which", "step"), [("lm@4", 4), ("lm@8", 8), (JOB, 8)])
def test_a_checkpoint_becomes_a_model_that_transformers_loads(
    which: str, step: int, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert call(["export", which, str(tmp_path / "model"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"job": JOB, "step": step, "path": str(tmp_path / "model")}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) <= 300
    last = AutoModelForCausalLM.from_pretrained(project / "kept" / "jobs" / JOB / "export")
    equal = [
        torch.equal(mine, other) for mine, other in zip(model.parameters(), last.parameters(), strict=True)
    ]
    assert all(equal) if step == 8 else not any(equal)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_cannot_be_exported_is_said(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(code: int, *arguments: str) -> str:
        assert call(["export", *arguments]) == code
        return capsys.readouterr().err

    model = str(tmp_path / "model")
    assert "the checkpoint of step 5 is not there; there are 4, 8" in fails(2, "lm@5", model)
    assert "after the @ stands a step" in fails(2, "lm@newest", model)
    assert "is there already" in fails(2, "lm@4", str(project))
    spoilt = project / "kept" / "jobs" / JOB / "checkpoints" / "step-00000004" / "__0_0.distcp"
    content = bytearray(spoilt.read_bytes())
    content[len(content) // 2] ^= 1
    spoilt.write_bytes(bytes(content))
    assert "the checkpoint of step 4 is damaged: __0_0.distcp is not" in fails(1, "lm@4", model)
    assert "the checkpoint of step 4 is damaged" in fails(2, "lm@4", model)
    assert not (tmp_path / "model").exists()
    assert call(["checkpoints", "lm"]) == 0
    assert "__0_0.distcp" in capsys.readouterr().out


def test_what_a_resumed_job_changes_is_named() -> None:
    before = tiny_job(Path("/corpus"))
    after = tiny_job(Path("/corpus"), batch={"global": 16}, parallel={"strategy": "fsdp"}, publish="lm")
    assert changes(before, after) == [
        'parallel.strategy: "ddp" → "fsdp"',
        "batch.global: 8 → 16",
        'publish: nothing → "lm"',
    ]
    assert changes(before, before) == []
