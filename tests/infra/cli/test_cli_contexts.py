"""`shoal connect`, `use`, `token`: a cluster of somebody else, from a place that has no config of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config.reading.api_keys import digest_of
from cluster.files.storage import Storage
from infra.api.control import Control
from infra.cli.main import call
from tests.served_api import RayJobs, control, served, up_here

CONFIG = """
cluster: {name: laptop, nodes: [{name: worker, cpus: 64}]}
train_jobs:
  lm: {data: {source: ./corpus.parquet}, workers: {min: 2, max: 2}}
"""


@pytest.fixture
def lab(tmp_path: Path) -> Control:
    return control(Storage(tmp_path / "lab" / "storage"), RayJobs())


@pytest.fixture
def port(lab: Control) -> Iterator[int]:
    with served(lab) as port:
        yield port


@pytest.fixture(autouse=True)
def elsewhere(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A home of one's own, and an empty folder to be in."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    for name in ("SHOAL_CONFIG", "SHOAL_CONTEXT"):
        monkeypatch.setenv(name, "")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return home


def token_file(lab: Control, folder: Path, role: str = "run") -> str:
    path = folder / role
    path.write_text(lab.tokens.make(role, role, "up") + "\n")  # type: ignore[arg-type]
    return str(path)


def test_a_cluster_is_used_from_where_nothing_is_known_of_it(
    lab: Control, port: int, tmp_path: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{port}"
    assert call(["jobs"]) == 2
    assert "there is no such file" in capsys.readouterr().err
    assert call(["connect", url, "--token-file", token_file(lab, tmp_path)]) == 0
    assert capsys.readouterr().out == "connected to cluster lab as run (run)\n"
    assert call(["jobs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert call(["use"]) == 0
    assert capsys.readouterr().out == f"* lab  {url}  (cluster lab)\n"
    (kept,) = (elsewhere / "config" / "shoal").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
    assert kept.parent.stat().st_mode & 0o777 == 0o700
    assert "shoal-" not in kept.read_text(), "the token stays in its own file"
    assert call(["tokens"]) == 2
    assert "run may run; this needs the role admin" in capsys.readouterr().err


def test_what_a_job_names_is_looked_for_where_it_runs_and_the_place_in_the_file_is_told(
    lab: Control, port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["connect", f"http://127.0.0.1:{port}", "--token-file", token_file(lab, tmp_path)]) == 0
    Path("shoal.yaml").write_text(CONFIG)
    capsys.readouterr()
    assert call(["train", "lm", "--detach"]) == 2
    message = capsys.readouterr().err
    missing = tmp_path / "here" / "corpus.parquet"
    assert f"shoal.yaml:4:23: train_jobs.lm.data.source: `{missing}` does not exist" in message
    assert "(seen from the head of cluster lab)" in message
    assert lab.audit.newest(10)[-1]["outcome"] == "refused"


def test_a_cluster_that_is_up_from_here_comes_before_the_current_context(
    lab: Control,
    port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = control(Storage(tmp_path / "other"), RayJobs())
    assert call(["connect", f"http://127.0.0.1:{port}", "--token-file", token_file(lab, tmp_path)]) == 0
    Path("shoal.yaml").write_text("cluster: {name: mine}\n")

    def asked() -> str:
        capsys.readouterr()
        assert call(["models", "--json"]) in (0, 1)
        assert call(["models"]) == 0
        return "lab" if str(lab.storage.location) in capsys.readouterr().out else "mine"

    assert asked() == "lab"
    with served(other) as mine:
        up_here("mine", other, mine)
        assert asked() == "mine"
        assert call(["--context", "lab", "models"]) == 0
        assert str(lab.storage.location) in capsys.readouterr().out
        monkeypatch.setenv("SHOAL_CONTEXT", "lab")
        assert asked() == "lab"
        monkeypatch.setenv("SHOAL_CONTEXT", "")
        assert asked() == "mine"


def test_contexts_are_chosen_and_forgotten(
    lab: Control, port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = token_file(lab, tmp_path)
    for name in ("one", "two"):
        asked = ["connect", f"http://127.0.0.1:{port}/", "--token-file", file, "--name", name]
        assert call(asked) == 0
    assert call(["use", "one"]) == 0
    capsys.readouterr()
    assert call(["use", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["current"]) for row in rows] == [("one", True), ("two", False)]
    assert call(["use", "three"]) == 2
    assert "there is no context 'three'; there are: one, two" in capsys.readouterr().err
    assert call(["use", "one", "--forget"]) == 0
    assert call(["jobs"]) == 2, "no other one takes its place by itself"
    assert call(["use", "two"]) == 0
    assert call(["use", "--none"]) == 0
    assert call(["jobs"]) == 2
    for wrong in (["use", "--forget"], ["use", "two", "--none"]):
        assert call(wrong) == 2


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("127.0.0.1:80", "should be http://HOST:PORT"),
        ("ftp://127.0.0.1", "should be http://HOST:PORT"),
        ("http://127.0.0.1:1/api/v1", "without a path"),
        ("http://127.0.0.1:1", "does not answer"),
    ],
)
def test_what_is_no_control_api_is_not_kept(
    url: str, says: str, tmp_path: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("shoal-x")
    assert call(["connect", url, "--token-file", str(tmp_path / "token")]) in (1, 2)
    assert says in capsys.readouterr().err
    assert not (elsewhere / "config" / "shoal").exists()


def test_a_wrong_token_is_not_kept(
    port: int, tmp_path: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, code, says in (
        ("shoal-wrong", 2, "this token is unknown here"),
        ("", 1, "should hold a token, and nothing else"),
        ("two words", 1, "should hold a token, and nothing else"),
    ):
        (tmp_path / "token").write_text(text)
        asked = ["connect", f"http://127.0.0.1:{port}", "--token-file", str(tmp_path / "token")]
        assert call(asked) == code
        assert says in capsys.readouterr().err
    assert call(["connect", f"http://127.0.0.1:{port}", "--token-file", str(tmp_path / "none")]) == 1
    assert not (elsewhere / "config" / "shoal").exists()


def test_tokens_are_made_listed_and_taken_back_and_noted(
    lab: Control, port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = token_file(lab, tmp_path, "admin")
    assert call(["connect", f"http://127.0.0.1:{port}", "--token-file", file]) == 0
    assert call(["token", "bob", "--role", "read", "--days", "2"]) == 0
    made = capsys.readouterr().out.split()[-1]
    caller = lab.tokens.caller_of(made)
    assert caller is not None
    assert (caller.name, caller.role) == ("bob", "read")
    assert call(["tokens", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["admin", "bob"]
    assert call(["token", "bob", "--revoke"]) == 0
    assert lab.tokens.caller_of(made) is None
    assert call(["token", "bob", "--role", "root"]) == 2
    capsys.readouterr()
    assert call(["key", "team-a", "--app", "chat", "--json"]) == 0
    key = json.loads(capsys.readouterr().out)
    assert key["file"] == lab.keys, "on the head, not here"
    assert digest_of(key["key"]) in Path(key["file"]).read_text()
    capsys.readouterr()
    assert call(["audit", "--json", "-n", "2"]) == 0
    lines = json.loads(capsys.readouterr().out)
    assert [(line["who"], line["operation"], line["outcome"]) for line in lines] == [
        ("admin", "make_key", "asked"),
        ("admin", "make_key", "done"),
    ]
    assert call(["audit"]) == 0
    assert "revoke_token bob: done" in capsys.readouterr().out
