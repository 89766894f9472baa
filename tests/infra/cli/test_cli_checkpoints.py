"""`shoal checkpoints` and `shoal export`: on the files of a run, with no cluster running."""

from __future__ import annotations

import gc
import io
import json
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster.errors import ShoalError
from cluster.files.storage import Storage
from infra.api.exports import tar_of
from infra.cli.checkpoints import unpack
from infra.cli.main import call
from tests.object_store import reached, uri
from tests.served_api import RayJobs, control, served
from tests.small_disk import only_small_files
from tests.train_jobs.ranks import run_ranks, tiny_job, write_corpus
from train_jobs.records.run_config import changes, write_run_config
from train_jobs.records.run_log import RunLog

MINE = """
from torch import nn

class Task:
    def __init__(self, config): pass
    def build(self): return nn.Linear(1, 1)
    def samples(self, held_out): raise NotImplementedError
    def loss(self, model, batch): raise NotImplementedError
    def sums(self, model, batch): raise NotImplementedError
"""
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


def test_of_a_run_in_an_object_store_only_what_a_model_needs_comes_here(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reached() as port:
        storage = Storage(uri(port, "cluster"))
        run = storage.child("jobs", JOB)
        run.copy_dir(Storage(project / "kept").child("jobs", JOB))
        with run.writer("data/train.npy") as much:
            much.write(bytes(3_000_000))
        (tmp_path / "shoal.yaml").write_text(f'cluster: {{storage: "{storage.location}"}}\n')
        monkeypatch.chdir(tmp_path)
        with only_small_files(2_000_000):
            assert call(["export", "lm@8", "model"]) == 0
    first, second = (path / "model.safetensors" for path in (tmp_path / "model", run_export(project)))
    assert first.read_bytes() == second.read_bytes()


def run_export(project: Path) -> Path:
    """The model that the run has left."""
    return project / "kept" / "jobs" / JOB / "export"


def test_a_model_for_which_there_is_no_room_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda place: real(place)._replace(free=20_000))
    assert call(["export", "lm@8", str(tmp_path / "new" / "model")]) == 1
    said = capsys.readouterr().err
    assert re.search(rf"the model takes 0\.\d+ GiB; in {tmp_path} there is room for 0\.\d+ GiB", said), said
    assert not (tmp_path / "new").exists()


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


@pytest.fixture
def elsewhere(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder from which the cluster that has the storage is a context; the API's temporary directory is
    `tmp_path`/head."""
    home, head = tmp_path / "home", tmp_path / "head"
    head.mkdir()
    monkeypatch.setenv("TMPDIR", str(head))
    monkeypatch.setattr("tempfile.tempdir", str(head))
    # Of torch's own, made by an import.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    lab = control(Storage(project / "kept"), RayJobs())
    (tmp_path / "token").write_text(lab.tokens.make(f"ann-{secrets.token_hex(4)}", "run", "up"))
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    with served(lab) as port:
        assert call(["connect", f"http://127.0.0.1:{port}", "--token-file", str(tmp_path / "token")]) == 0
        yield tmp_path / "there"


@pytest.mark.slow
def test_a_model_comes_from_a_cluster_that_is_elsewhere(
    elsewhere: Path, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    capsys.readouterr()
    assert call(["export", "lm@8", "model", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"job": JOB, "step": 8, "path": str(elsewhere / "model")}
    model = AutoModelForCausalLM.from_pretrained(elsewhere / "model")
    assert len(AutoTokenizer.from_pretrained(elsewhere / "model")) <= 300
    last = AutoModelForCausalLM.from_pretrained(project / "kept" / "jobs" / JOB / "export")
    both = zip(model.parameters(), last.parameters(), strict=True)
    assert all(torch.equal(mine, other) for mine, other in both)
    assert call(["export", "lm", "model"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert call(["export", "lm@5", "other"]) == 2
    assert "the checkpoint of step 5 is not there; there are" in capsys.readouterr().err
    assert call(["export", "nobody", "other"]) == 2
    assert [path.name for path in elsewhere.iterdir()] == ["model"]
    assert list((elsewhere.parent / "head").iterdir()) == []


@pytest.mark.slow
def test_the_code_of_a_task_goes_where_it_is_exported(
    elsewhere: Path, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, kept = "mine-20260101-000000-abcd", project / "kept" / "jobs"
    shutil.copytree(kept / JOB / "checkpoints", kept / job / "checkpoints")
    config = tiny_job(project / "corpus.parquet", task="mine:Task")
    write_run_config(Storage(project / "kept"), job, "mine", config)
    RunLog(Storage(project / "kept").child("jobs", job)).event(
        "2026-01-02T00:00:00Z", "submitted", name="mine", steps=8
    )
    capsys.readouterr()
    assert call(["export", "mine@8", "model"]) == 2
    assert "task 'mine:Task' cannot be imported" in capsys.readouterr().err
    (elsewhere / "mine.py").write_text(MINE)
    own = "train_jobs: {mine: {task: 'mine:Task', data: {source: /x}, steps: 8}}\n"
    (elsewhere / "shoal.yaml").write_text(own)
    assert call(["export", "mine@8", "model"]) == 1
    assert "the checkpoint of step 8 is not one of this model" in capsys.readouterr().err
    assert not (elsewhere / "model").exists()
    assert list((elsewhere.parent / "head").iterdir()) == []


def test_what_is_cut_off_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    model = tmp_path / "made" / "model"
    (model / "deep").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "deep" / "weights").write_bytes(bytes(3_000_000))
    whole = b"".join(tar_of(model))
    assert not model.parent.exists(), "what is sent goes"
    unpack(io.BytesIO(whole), tmp_path / "whole")
    assert (tmp_path / "whole" / "deep" / "weights").stat().st_size == 3_000_000
    with pytest.raises(ShoalError, match="did not arrive whole"):
        unpack(io.BytesIO(whole[: len(whole) // 2]), tmp_path / "half")
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    pieces = tar_of(model)
    assert model.exists()
    del pieces
    gc.collect()
    assert not model.parent.exists(), "so does what nobody asks for"


def test_what_a_resumed_job_changes_is_named() -> None:
    before = tiny_job(Path("/corpus"))
    after = tiny_job(Path("/corpus"), batch={"global": 16}, parallel={"strategy": "fsdp"}, publish="lm")
    assert changes(before, after) == [
        'parallel.strategy: "ddp" → "fsdp"',
        "batch.global: 8 → 16",
        'publish: nothing → "lm"',
    ]
    assert changes(before, before) == []
