"""`shoal models`: the registry of the config's storage, with no cluster running."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.files.storage import Storage
from cluster.models.registry import Registry
from infra.cli.main import call


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "shoal.yaml").write_text("cluster: {storage: ./kept}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_CONFIG", str(tmp_path / "project" / "shoal.yaml"))


def test_an_empty_registry_is_an_empty_list_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert call(["models"]) == 0
    assert "nothing is published" in capsys.readouterr().out
    assert not (tmp_path / "project" / "kept").exists()


def test_every_version_is_listed_with_what_others_rely_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    registry = Registry(Storage(tmp_path / "project" / "kept"))
    first = registry.publish("lm", tmp_path / "model", {"job": "lm-1", "step": 200})
    second = registry.publish("lm", tmp_path / "model", {})
    assert call(["models", "--json"]) == 0
    models = str(tmp_path / "project" / "kept" / "models")
    assert json.loads(capsys.readouterr().out) == [
        {
            "name": "lm",
            "version": 1,
            "aliases": [],
            "path": f"{models}/lm/1",
            "job": "lm-1",
            "step": 200,
            "created_at": first.created_at,
        },
        {
            "name": "lm",
            "version": 2,
            "aliases": ["latest"],
            "path": f"{models}/lm/2",
            "job": None,
            "step": None,
            "created_at": second.created_at,
        },
    ]
    assert call(["models"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("lm", "lm-1", "200", "latest", f"{models}/MODEL/VERSION"))


def test_a_storage_that_cannot_be_read_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "project" / "kept").write_text("a file")
    assert call(["models"]) == 1
    streams = capsys.readouterr()
    assert (streams.out, "not a directory" in streams.err) == ("", True)
