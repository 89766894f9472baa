"""`shoal init`, `validate` and `schema`, and how every command ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import typer

from cluster.config.template import TEMPLATE
from cluster.errors import RequestError, ShoalError
from infra.cli import common
from infra.cli.main import call

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHOAL_CONFIG", raising=False)


def shoal(*arguments: str, timeout_s: float = 30, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "infra.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        check=False,
    )


def test_init_writes_a_file_that_validate_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["init", "project"]) == 0
    assert capsys.readouterr().out == "wrote project/shoal.yaml\nwrote project/shoal.schema.json\n"
    assert call(["validate", "-f", "project/shoal.yaml"]) == 0
    valid, travels = capsys.readouterr().out.splitlines()
    assert valid == "project/shoal.yaml is valid: 3 nodes, 1 job, 1 app (chat: torch)"
    assert re.fullmatch(r"stdlib-lm: 2 files travel, \d+ KiB", travels)
    assert {path.name for path in (tmp_path / "project").iterdir()} == {"shoal.yaml", "shoal.schema.json"}


def test_init_without_a_directory_writes_here_and_never_overwrites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["init", "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert files == [str(tmp_path / "shoal.yaml"), str(tmp_path / "shoal.schema.json")]
    (tmp_path / "shoal.yaml").write_text("mine")
    assert call(["init"]) == 2
    streams = capsys.readouterr()
    assert (streams.out, "shoal.yaml" in streams.err) == ("", True)
    assert (tmp_path / "shoal.yaml").read_text() == "mine"
    assert call(["init", "--force"]) == 0
    assert (tmp_path / "shoal.yaml").read_text() == TEMPLATE


def test_validate_lists_each_mistake_on_its_line_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shoal.yaml").write_text("train_jobs:\n  a:\n    parallel: {stragety: fsdp}\n    steps: 0\n")
    assert call(["validate", "--set", "train_jobs.a.seed=x"]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    first, second, third = streams.err.splitlines()
    assert first.startswith(
        "shoal.yaml:3:16: train_jobs.a.parallel.stragety: unknown key `stragety`; did you mean"
    )
    assert second == "shoal.yaml:4:12: train_jobs.a.steps: should be a whole number of at least 1, was 0"
    assert third.startswith("--set: train_jobs.a.seed: should be a whole number")


def test_validate_as_json_holds_the_same_in_one_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("train_jobs:\n  a:\n    optimizer: {learning_rate: .nan}\n")
    assert call(["validate", "--json", "-f", str(path)]) == 2
    streams = capsys.readouterr()
    assert streams.err == ""
    assert json.loads(streams.out) == {
        "ok": False,
        "errors": [
            {
                "file": str(path),
                "line": 3,
                "column": 32,
                "path": "train_jobs.a.optimizer.learning_rate",
                "given": "nan",
                "message": "should be a number above 0, was nan",
            }
        ],
    }
    assert (
        call(["validate", "--json", "-f", str(path), "--set", "train_jobs.a.optimizer.learning_rate=1"]) == 0
    )
    assert json.loads(capsys.readouterr().out) == {"ok": True, "errors": []}


def test_validate_as_json_without_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["validate", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert [error["file"] for error in document["errors"]] == ["shoal.yaml"]


def test_the_schema_is_json_that_the_validator_accepts(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert set(schema["properties"]) == {"cluster", "train_jobs", "serve_apps"}


@pytest.mark.parametrize(
    "arguments", [["--versio"], ["validat"], ["validate", "--nope"], ["validate", "-f"], ["init", "a", "b"]]
)
def test_a_wrong_command_line_exits_2_and_says_so_on_standard_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(arguments) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "Error" in streams.err
    assert "Traceback" not in streams.err


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["--version"]) == 0
    assert capsys.readouterr().out.startswith("shoal ")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ShoalError("it failed because of x"), 1, "it failed because of x\n"),
        (RequestError("there is no job y"), 2, "there is no job y\n"),
        (KeyboardInterrupt(), 130, ""),
        (typer.Exit(3), 3, ""),
    ],
)
def test_errors_become_sentences_and_exit_codes(
    error: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer()

    @app.command()
    def fail() -> None:
        raise error

    found = common.run(lambda: app(args=[]))
    assert found == code
    streams = capsys.readouterr()
    assert (streams.out, streams.err) == ("", words)


def test_an_interruption_before_the_command_has_started_exits_like_one_within() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert common.run(interrupted) == 130


def test_mistakes_of_ours_keep_their_traceback() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        common.run(fail)


BAD_FILES: dict[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "tabs": b"cluster:\n\tname: x\n",
    "list": b"- a\n",
    "twice": b"cluster: {}\ncluster: {}\n",
    "deep": b"cluster: " + b"[" * 10_000 + b"]" * 10_000,
    "binary": bytes(range(256)) * 16,
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_end_a_real_process_with_one_sentence_and_2(name: str, tmp_path: Path) -> None:
    content = BAD_FILES[name]
    if content is not None:
        (tmp_path / "bad.yaml").write_bytes(content)
    done = shoal("validate", "-f", "bad.yaml")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("bad.yaml")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_the_environment_only_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("cluster: {nam: x}\n")
    assert shoal("validate", SHOAL_CONFIG="other.yaml").stderr.startswith(
        "other.yaml:1:11: cluster.nam: unknown key"
    )
    (tmp_path / "shoal.yaml").write_text("cluster: {}\n")
    done = shoal("validate", SHOAL_CLUSTER_NAME="Bad Name", CLUSTER__NAME="Bad Name")
    assert done.returncode == 0


def test_a_reader_that_goes_away_gets_no_traceback() -> None:
    command = f"{sys.executable} -m infra.cli.main schema | head -c 10"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.stderr == ""


def test_validate_says_what_travels_with_a_job_and_what_is_too_large(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.bin").write_bytes(bytes(3 * 2**20))
    (tmp_path / "train.py").write_text("")
    (tmp_path / "shoal.yaml").write_text(
        "train_jobs:\n  gpt: {steps: 3}\n  own: {task: script, script: train.py}\n"
    )
    (tmp_path / ".gitignore").write_text("data\n")
    monkeypatch.chdir(tmp_path)
    assert call(["validate"]) == 0
    printed = capsys.readouterr().out
    assert "gpt: 3 files travel, 0 KiB\n" in printed
    assert "gpt: left out by .gitignore: data\n" in printed
    conf = tmp_path / "conf"
    conf.mkdir()
    (conf / "shoal.yaml").write_text(
        "train_jobs:\n  own: {task: script, script: train.py, working_dir: ..}\n"
    )
    assert call(["validate", "-f", str(conf / "shoal.yaml")]) == 0
    assert "own: 4 files travel, 0 KiB\n" in capsys.readouterr().out
    monkeypatch.setattr("train_jobs.driver.package.MOST_BYTES", 2**20)
    assert call(["validate", "--json"]) == 0
    (tmp_path / ".gitignore").unlink()
    capsys.readouterr()
    assert call(["validate", "--json"]) == 2
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["path"] == "train_jobs.gpt", (
        "the files of a script go into the storage, however large they are"
    )
    assert "3 MiB in 4 files, of at most 1. The largest in it: data (3 MiB)" in error["message"]
