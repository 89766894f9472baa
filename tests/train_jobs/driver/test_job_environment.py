"""Variables and packages of a job: what is submitted, what a resumption keeps, what its agents are given."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster.config.loader import RUN_FILE
from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError
from cluster.files.storage import Storage
from cluster.state.connection import ClusterRecord
from train_jobs import __main__ as entrypoint
from train_jobs.driver import data_process, submission
from train_jobs.driver.submission import Submissions
from train_jobs.driver.tokenizing_nodes import NodesEncoder
from train_jobs.group.job_agents import JobAgents
from train_jobs.records.run_config import read_run_config

VALUES: dict[str, Any] = {
    "env": {"NCCL_DEBUG": "WARN", "WORDS": 7, "HF_TOKEN": None},
    "pip": ["tiktoken==0.9"],
}
REFUSED = r"^env: HF_TOKEN should be passed on \(null in the config\), and is not set here$"


class Client:
    """Ray's job API, as far as a submission asks it."""

    def __init__(self) -> None:
        self.runtime_envs: list[dict[str, Any]] = []

    def submit_job(self, *, runtime_env: dict[str, Any], **_: Any) -> None:
        del runtime_env["working_dir"]
        self.runtime_envs.append(runtime_env)


@pytest.fixture
def submissions(monkeypatch: pytest.MonkeyPatch) -> Submissions:
    """Those of a cluster that is not there."""
    monkeypatch.setattr(submission, "point_at", lambda record: None)
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", lambda url: Client())
    record = ClusterRecord("none", "", "", "", "", "", "", "", "", 0, "")
    return Submissions(record)


def submit(submissions: Submissions, directory: Path, config: TrainJobConfig) -> dict[str, Any]:
    """Submit a job from an empty folder; returns the runtime_env of what Ray starts."""
    (directory / "folder").mkdir(exist_ok=True)
    storage = Storage(directory / "storage")
    submissions.submit(storage, "a-1", "a", config, "submission", directory / "folder")
    return cast(Client, submissions.client).runtime_envs[-1]


def test_a_job_is_submitted_with_its_variables_and_packages_and_resumed_with_the_same(
    submissions: Submissions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainJobConfig.model_validate(VALUES)
    given = {"NCCL_DEBUG": "WARN", "WORDS": "7"}
    monkeypatch.setenv("HF_TOKEN", "first")
    first = submit(submissions, tmp_path, config)
    assert first == {"env_vars": {**given, "HF_TOKEN": "first"}, "pip": ["tiktoken==0.9"]}
    written = [path.read_text() for path in (tmp_path / "storage").rglob("*") if path.is_file()]
    assert any("NCCL_DEBUG" in text for text in written)
    assert not any("first" in text for text in written), "what is passed on is kept nowhere"

    monkeypatch.setenv("HF_TOKEN", "second")
    name, kept = read_run_config(Storage(tmp_path / "storage"), "a-1")
    assert (name, kept) == ("a", config)
    again = submit(submissions, tmp_path, kept)
    assert again == {"env_vars": {**given, "HF_TOKEN": "second"}, "pip": ["tiktoken==0.9"]}


def test_a_job_is_not_submitted_without_a_variable_that_should_be_passed_on(
    submissions: Submissions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(RequestError, match=REFUSED):
        submit(submissions, tmp_path, TrainJobConfig.model_validate(VALUES))
    assert cast(Client, submissions.client).runtime_envs == []
    assert not (tmp_path / "storage" / "jobs").exists()


def test_a_job_without_variables_and_packages_asks_for_none(submissions: Submissions, tmp_path: Path) -> None:
    assert submit(submissions, tmp_path, TrainJobConfig()) == {}


# -- a job that `ray job submit` starts --------------------------------------------------------------------


@dataclass
class Started:
    """A folder with the config of a job, and the drivers that the entrypoint has started in it."""

    storage: Path
    jobs: list[tuple[str, TrainJobConfig]]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    found = Started(tmp_path / "storage", [])

    def driver(job: str, config: TrainJobConfig, storage: Storage) -> SimpleNamespace:
        found.jobs.append((job, config))
        return SimpleNamespace(run=lambda: 0)

    broker = SimpleNamespace(info=lambda: {"storage": str(found.storage)})
    monkeypatch.setattr(entrypoint.ray, "init", lambda **_: None)
    monkeypatch.setattr(entrypoint, "BrokerClient", lambda: broker)
    monkeypatch.setattr(entrypoint, "Driver", driver)
    monkeypatch.setattr(entrypoint, "_submission_id", lambda: "raysubmit")
    (tmp_path / "shoal.yaml").write_text(f"cluster: {{name: c}}\ntrain_jobs: {{a: {json.dumps(VALUES)}}}\n")
    monkeypatch.chdir(tmp_path)
    return found


def test_an_entrypoint_passes_on_what_it_has(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert entrypoint.main(["a"]) == 0
    ((job, config),) = started.jobs
    assert config == TrainJobConfig.model_validate(VALUES)
    assert "secret" not in (started.storage / "jobs" / job / RUN_FILE).read_text()


def test_an_entrypoint_that_has_it_not_is_refused_with_the_same_sentence(
    started: Started, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert entrypoint.main(["a"]) == 2
    said = capsys.readouterr().err.strip()
    assert said == "error: env: HF_TOKEN should be passed on (null in the config), and is not set here"
    assert started.jobs == []
    assert not (started.storage / "jobs").exists()


@pytest.fixture
def asked_of_ray(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What actors are made with, from now on."""
    asked: list[dict[str, Any]] = []

    def remote(**options: Any) -> Any:
        asked.append(options)
        return lambda kind: kind

    monkeypatch.setattr("cluster.node.agents.ray.remote", remote)
    return asked


def test_agents_and_tokenizing_nodes_have_what_is_passed_on_however_the_job_was_started(
    asked_of_ray: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks have it from their agent. Of the driver's environment Ray gives an actor what it is told to."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    config = TrainJobConfig.model_validate(VALUES)
    variables = {"NCCL_DEBUG": "WARN", "WORDS": "7", "HF_TOKEN": "secret"}
    JobAgents(config)
    (options,) = asked_of_ray
    assert options["runtime_env"] == {"env_vars": variables, "pip": ["tiktoken==0.9"]}
    encode = data_process._encoder(config, ["n1"])
    assert cast(NodesEncoder, encode).env == variables
