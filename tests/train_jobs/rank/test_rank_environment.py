"""What a job gives its processes as `env` reaches its ranks: those of a script, and those of a task."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from cluster.config.sections.train import TrainJobConfig
from cluster.node.forked_processes import ProcessEnd
from tests.train_jobs.group.test_job_agents import fork_server
from tests.train_jobs.rank.test_rank_processes import LocalWorker
from train_jobs.driver.failures import FailureClass, class_of
from train_jobs.group.job_agents import JobAgent
from train_jobs.rank.link import RankLink, RankOrder
from train_jobs.rank.script import RankPlace
from train_jobs.spec import WORK, group_spec, runtime_env_of

ENV = {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": 1, "HF_TOKEN": None, "PYTHONFAULTHANDLER": "0"}
SHOWN = {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1", "HF_TOKEN": "secret", "PYTHONFAULTHANDLER": "0"}
SHOWS = f"""
import json, os, torch
shown = {{name: os.environ.get(name) for name in {list(ENV)}}}
print(json.dumps([shown, torch.get_num_threads()]), flush=True)
"""
TASK = f"""
from cluster.errors import RequestError
{SHOWS.replace("print(", "TOLD = (").replace(", flush=True", "")}
class Task:
    def __init__(self, config):
        raise RequestError(TOLD)
    def build(self): ...
    def samples(self, held_out): ...
    def loss(self, model, batch): ...
"""


def worker(directory: Path, **job: Any) -> LocalWorker:
    config = TrainJobConfig.model_validate({"env": ENV, "workers": {"cpus": 2}, **job})
    spec = group_spec("job", config, str(directory), 1, 0, ["n1"])
    return LocalWorker(
        RankOrder(spec, RankPlace(0, 1, 0, 1, 0, 1), "127.0.0.1", "n1", None, {}), threading.Event(), []
    )


def run(workers: list[LocalWorker]) -> list[ProcessEnd]:
    """Run each of them under one agent, as that of a node does."""

    async def go() -> list[ProcessEnd]:
        agent = JobAgent()
        ends = [await agent.run_rank("group", RankLink(each).at) for each in workers]
        server = fork_server()
        server.kill()
        server.wait(10)
        return ends

    return asyncio.run(go())


@pytest.mark.slow
def test_variables_of_a_job_reach_its_script_and_its_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / WORK).mkdir()
    (tmp_path / WORK / "show.py").write_text(SHOWS)
    (tmp_path / "showing_task.py").write_text(TASK)
    monkeypatch.syspath_prepend(str(tmp_path))
    script = worker(tmp_path, task="script", script="show.py")
    task = worker(tmp_path, task="showing_task:Task")
    config = TrainJobConfig.model_validate({"env": ENV})
    for name, value in runtime_env_of(config, {"HF_TOKEN": "secret"})["env_vars"].items():
        monkeypatch.setenv(name, value)  # as Ray starts the agent
    assert [end.code for end in run([script, task])] == [0, 0]
    assert script.status == "finished", script.error
    printed = (tmp_path / "logs" / "attempt-1" / "rank-0.log").read_text()
    assert json.loads(printed) == [SHOWN, 1]
    assert task.error is not None
    assert class_of(task.error.kind, task.error.message) is FailureClass.REQUEST
    assert json.loads(task.error.message) == [SHOWN, 1]
