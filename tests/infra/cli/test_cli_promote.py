"""`shoal promote`: aliases from the command line, with no cluster running."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.files.storage import Storage
from cluster.models.registry import Registry
from infra.cli.main import call
from tests.clusters import shoal


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A config file whose storage holds chat@1, chat@2 and chat@3."""
    monkeypatch.delenv("SHOAL_CONFIG", raising=False)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    registry = Registry(Storage(tmp_path / "kept"))
    for step in (10, 20, 30):
        registry.publish("chat", model, {"job": f"chat-{step}", "step": step})
    path = tmp_path / "shoal.yaml"
    path.write_text("cluster: {storage: ./kept}\n")
    return str(path)


def rows(config: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert call(["models", "--json", "-f", config]) == 0
    listed: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return listed


def test_people_are_told_what_the_alias_named_before(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    for reference, said in (
        ("chat@1", "chat@production: none -> 1"),
        ("chat@latest", "chat@production: 1 -> 3"),
        ("chat@production", "chat@production: 3, as before"),
        ("chat@2", "chat@production: 3 -> 2"),
    ):
        assert call(["promote", reference, "production", "-f", config]) == 0
        streams = capsys.readouterr()
        assert (streams.out, streams.err) == (f"{said}\n", "")
    assert [row["aliases"] for row in rows(config, capsys)] == [[], ["production"], ["latest"]]
    assert call(["models", "-f", config]) == 0
    assert "production" in capsys.readouterr().out


def test_json_is_the_row_of_models(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["promote", "chat@1", "production", "-f", config]) == 0
    capsys.readouterr()
    assert call(["promote", "chat@latest", "production", "--json", "-f", config]) == 0
    streams = capsys.readouterr()
    row = json.loads(streams.out)
    assert streams.err == "chat@production: 1 -> 3\n"
    assert (row["version"], row["aliases"], row["step"]) == (3, ["latest", "production"], 30)
    assert row == rows(config, capsys)[2]


def test_the_storage_can_be_given_for_one_command(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shoal.yaml").write_text("cluster: {storage: ./empty}\n")
    assert call(["promote", "chat@1", "production", "-f", config]) == 2
    assert "nothing is published" in capsys.readouterr().err
    assert not (tmp_path / "empty").exists()
    kept = f"cluster.storage={tmp_path}/kept"
    assert call(["promote", "chat@1", "production", "-f", config, "--set", kept]) == 0
    assert Registry(Storage(tmp_path / "kept")).resolve("chat@production").version == 1


@pytest.mark.parametrize(
    ("reference", "alias", "message"),
    [
        ("chat@1", "latest", "latest always names the newest version and cannot be promoted to"),
        ("chat@1", "2", "'2' is no name for an alias: digits alone are a version"),
        ("chat@1", "Prod", "'Prod' is no name for an alias: lower-case letters"),
        ("production", "chat@1", "'chat@1' is no name for an alias"),
        ("chat", "production", "'chat' names no version: write chat@3 or chat@latest"),
        ("chat@", "production", "'chat' names no version"),
        ("chat@9", "production", "there is no chat@9: chat has the versions 1, 2, 3 and the alias latest"),
        ("chat@lates", "production", "there is no chat@lates (did you mean chat@latest?)"),
        ("chta@1", "production", "there is no model 'chta'"),
        ("../chat@1", "production", "there is no model '../chat'"),
    ],
)
def test_a_wrong_request_is_one_sentence_and_changes_nothing(
    config: str, capsys: pytest.CaptureFixture[str], reference: str, alias: str, message: str
) -> None:
    for more in ([], ["--json"]):
        assert call(["promote", reference, alias, "-f", config, *more]) == 2
        streams = capsys.readouterr()
        assert streams.out == ""
        assert message in streams.err
        assert streams.err.count("\n") == 1, streams.err
    assert [row["aliases"] for row in rows(config, capsys)] == [[], [], ["latest"]]


def test_a_storage_that_cannot_be_written_is_a_failure(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept" / "models" / "chat" / ".aliases").write_text("a file")
    assert call(["promote", "chat@1", "production", "-f", config]) == 1
    assert "not a directory" in capsys.readouterr().err.lower()


def test_the_alias_that_was_promoted_is_what_an_app_of_the_file_may_serve(
    config: str, tmp_path: Path
) -> None:
    with open(config, "a") as file:
        file.write("serve_apps: {chat: {model: chat@production}}\n")
    before = shoal("validate", "--json", "-f", config)
    assert before.returncode == 2
    (mistake,) = json.loads(before.stdout)["errors"]
    assert (mistake["path"], mistake["given"]) == ("serve_apps.chat.model", "chat@production")
    assert "there is no chat@production: chat has the versions 1, 2, 3" in mistake["message"]
    promoted = shoal("promote", "chat@2", "production", "-f", config)
    assert (promoted.returncode, promoted.stdout) == (0, "chat@production: none -> 2\n"), promoted.stderr
    assert shoal("validate", "-f", config).returncode == 0
