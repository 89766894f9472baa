"""Ranks of a script, each beside its rank's process: progress, hangs, and who ends before the others."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.config.sections.train import TrainJobConfig
from tests.train_jobs.fork_server import Server
from tests.train_jobs.rank.test_rank_processes import LocalWorker, start
from train_jobs.driver.failures import FailureClass, classify
from train_jobs.group.job_agents import PRELOADED
from train_jobs.group.outcome import rank_failure
from train_jobs.rank.link import RankOrder
from train_jobs.rank.script import RankPlace
from train_jobs.spec import WORK, group_spec
from train_jobs.watch.flight_recorder import FlightRecorder

PROGRESS = r"step (?P<step>\d+)/(?P<steps>\d+), loss (?P<loss>\S+)"


def job_of(world_size: int, **job: Any) -> TrainJobConfig:
    workers = {"min": world_size, "max": world_size}
    return TrainJobConfig.model_validate(
        {"task": "script", "script": "train.py", "workers": workers, "progress": PROGRESS, **job}
    )


def ranks_of(
    directory: Path, script: str, world_size: int = 2, flights: str | None = None, **job: Any
) -> list[LocalWorker]:
    (directory / WORK).mkdir()
    (directory / WORK / "train.py").write_text(script)
    return group_of(directory, world_size, flights=flights, **job)


def group_of(
    directory: Path,
    world_size: int,
    attempt: int = 3,
    device: int | None = None,
    flights: str | None = None,
    **job: Any,
) -> list[LocalWorker]:
    """The workers of an attempt whose script lies there already."""
    config = job_of(world_size, **job)
    spec = group_spec("job", config, str(directory), attempt, 0, ["n1"] * world_size)
    met, addresses = threading.Event(), list[str]()
    places = [RankPlace(rank, world_size, rank, world_size, 0, 1) for rank in range(world_size)]
    orders = [RankOrder(spec, place, "127.0.0.1", "n1", device, {}, flights=flights) for place in places]
    return [LocalWorker(order, met, addresses) for order in orders]


def run(server: Server, ranks: list[LocalWorker]) -> None:
    """Run them to their end."""
    start(server, ranks)
    for _ in ranks:
        assert server.answer()["code"] == 0, [rank.error for rank in ranks]


@pytest.mark.slow
def test_steps_that_a_script_prints_are_steps_of_the_job(server: Server, tmp_path: Path) -> None:
    ranks = ranks_of(
        tmp_path,
        "import os, time\n"
        "from pathlib import Path\n"
        "checkpoints = Path(os.environ['SHOAL_CHECKPOINT_DIR'])\n"
        "for step in range(1, 13):\n"
        "    print(f'step {step}/12, loss {1 / step}', flush=True)\n"
        "    time.sleep(0.3)\n"
        "    if step == 3:\n"
        "        checkpoints.mkdir(exist_ok=True)\n"
        "        (checkpoints / 'model.pt').write_text('x')\n"
        "    if step == 4:\n"
        "        time.sleep(7)\n",  # two looks
    )
    run(server, ranks)
    lines = ranks[0].lines
    assert [rank.status for rank in ranks] == ["finished", "finished"]
    assert lines[-1]["step"] == 12
    assert {line["steps"] for line in lines} == {12}
    assert all(line["loss"] == 1 / line["step"] and line["attempt"] == 3 for line in lines)
    assert (lines[0]["count"], lines[0]["step_s"]) == (0, 0.0), "it is not known how long that took"
    assert sum(line["count"] for line in lines) == 12 - lines[0]["step"]
    (long,) = [line for line in lines if line["step_s"] > 5]
    assert long["step"] == 5
    assert ranks[0].events.count("saved") == 1
    assert ranks[1].lines == []


HANGS = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
print("step 1/9, loss 1", flush=True)
if dist.get_rank() == 1:
    while True:
        time.sleep(1)
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.slow
def test_a_script_that_hangs_is_found_and_it_is_told_which_rank_does(server: Server, tmp_path: Path) -> None:
    ranks = ranks_of(tmp_path, HANGS, recovery={"hang_timeout_s": 3.0})
    began = time.monotonic()
    run(server, ranks)
    assert time.monotonic() - began < 60
    errors = [rank.error for rank in ranks]
    assert all(error is not None and error.hung for error in errors), errors
    waits, stands = errors
    assert waits is not None
    assert stands is not None
    assert (waits.collective, stands.collective) == (True, False)
    assert 'train.py", line 8 in <module>' in stands.trace
    assert "all_reduce" in waits.trace
    failures = [rank_failure(error.rank, error) for error in (waits, stands)]
    failure = classify(failures, ["n1", "n1"], {"n1"}, {})
    assert (failure.failure_class, failure.rank) == (FailureClass.HANG, 1)
    assert failure.reason == "rank 1 did not get on: rank 0 has printed and saved nothing for 3 s"


HANGS_IN_NCCL = """
import os, time
from pathlib import Path
pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + os.environ["RANK"] + ".pipe"
os.mkfifo(pipe)
asked = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
print("step 1/9, loss 1", flush=True)
while not os.read(asked, 8):
    time.sleep(0.1)
Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + os.environ["RANK"]).write_text("what it did")
time.sleep(600)
"""


def test_a_script_that_hangs_writes_down_what_its_nccl_did(server: Server, tmp_path: Path) -> None:
    (tmp_path / "flights").mkdir()
    prefix = f"{tmp_path}/flights/rank-"
    ranks = ranks_of(tmp_path, HANGS_IN_NCCL, 1, flights=prefix, recovery={"hang_timeout_s": 1.0})
    run(server, ranks)
    assert ranks[0].error is not None
    assert ranks[0].error.hung
    assert FlightRecorder(prefix, 0).read() == b"what it did"


@pytest.mark.slow
def test_one_that_prints_or_saves_does_not_hang(server: Server, tmp_path: Path) -> None:
    ranks = ranks_of(
        tmp_path,
        "import os, time\n"
        "print('step 1/2, loss 1', flush=True)\n"
        "os.makedirs(os.environ['SHOAL_CHECKPOINT_DIR'])\n"
        "with open(os.environ['SHOAL_CHECKPOINT_DIR'] + '/large', 'w') as file:\n"
        "    for _ in range(30):\n"
        "        time.sleep(0.5)\n"
        "        print('x', file=file, flush=True)\n"
        "for _ in range(10):\n"
        "    time.sleep(1)\n"
        "    print('evaluating', flush=True)\n",
        world_size=1,
        recovery={"hang_timeout_s": 8.0},
    )
    run(server, ranks)
    assert ranks[0].status == "finished", ranks[0].error


@pytest.mark.slow
def test_those_who_wait_for_its_end_hear_that_a_script_saves(server: Server, tmp_path: Path) -> None:
    ranks = ranks_of(
        tmp_path,
        "import os, pathlib, signal, sys, time\n"
        "def save(*_):\n"
        "    directory = pathlib.Path(os.environ['SHOAL_CHECKPOINT_DIR'])\n"
        "    directory.mkdir(exist_ok=True)\n"
        "    for part in range(200):\n"
        "        (directory / f'{os.environ[\"RANK\"]}-{part}').touch()\n"
        "        time.sleep(0.05)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "open('ready-' + os.environ['RANK'], 'w').close()\n"
        "time.sleep(600)\n",
    )

    def are_ready() -> bool:
        return all((tmp_path / WORK / f"ready-{rank}").exists() for rank in range(2))

    told: dict[int, set[bool]] = {0: set(), 1: set()}
    for rank, words in zip(ranks, told.values(), strict=True):
        rank.is_stopping = are_ready  # type: ignore[method-assign]
        rank.progress = lambda activity, words=words: words.add(activity.saves)  # type: ignore[method-assign]
    run(server, ranks)
    assert [rank.status for rank in ranks] == ["stopped", "stopped"]
    assert told == {0: {False, True}, 1: {False, True}}


@pytest.mark.slow
def test_without_progress_nobody_knows_how_long_a_script_may_be_silent(
    server: Server, tmp_path: Path
) -> None:
    script = "import time\nprint('step 1/2, loss 1', flush=True)\ntime.sleep(6)\n"
    ranks = ranks_of(tmp_path, script, 1, progress=None, recovery={"hang_timeout_s": 2.0})
    run(server, ranks)
    assert (ranks[0].status, ranks[0].lines) == ("finished", [])


THREE = HANGS.replace("get_rank() == 1", "get_rank() == 2")


@pytest.mark.slow
def test_who_waits_beside_rank_0_for_one_that_hangs_is_not_taken_for_a_cause(
    server: Server, tmp_path: Path
) -> None:
    ranks = ranks_of(tmp_path, THREE, 3, recovery={"hang_timeout_s": 3.0})
    run(server, ranks)
    errors = [rank.error for rank in ranks if rank.error is not None]
    assert [(error.kind, error.hung) for error in errors] == [("Hang", True)] * 3
    assert [error.collective for error in errors] == [True, True, False]
    failure = classify([rank_failure(each.rank, each) for each in errors], ["n1"] * 3, {"n1"}, {})
    assert (failure.failure_class, failure.rank) == (FailureClass.HANG, 2)


SEES_IT_GO = """
import os, time
from pathlib import Path
pid = Path(os.environ["SHOAL_WORK_DIR"], "pid")
if os.environ["RANK"] == "0":
    pid.write_text(str(os.getpid()))
    print("step 1/9, loss 1", flush=True)
    time.sleep(600)
while not pid.exists() or not pid.read_text():
    time.sleep(0.01)
while Path("/proc", pid.read_text(), "exe").exists():
    time.sleep(0.01)
raise RuntimeError("Connection closed by peer")
"""


def test_who_loses_its_peer_to_the_end_of_a_hang_blames_nobody(server: Server, tmp_path: Path) -> None:
    ranks = ranks_of(tmp_path, SEES_IT_GO, recovery={"hang_timeout_s": 3.0})
    run(server, ranks)
    errors = [rank.error for rank in ranks if rank.error is not None]
    assert [(error.kind, error.collective) for error in errors] == [("Hang", False), ("Hang", True)]


ENDS_EARLY = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    sys.exit(0)
time.sleep(1)
dist.all_reduce(torch.ones(1))
"""


def test_a_rank_that_ends_before_the_others_is_named(server: Server, tmp_path: Path) -> None:
    ranks = ranks_of(tmp_path, ENDS_EARLY)
    run(server, ranks)
    assert ranks[1].status == "finished"
    error = ranks[0].error
    assert error is not None
    failure = classify([rank_failure(0, error)], ["n1", "n1"], {"n1"}, {})
    assert failure.failure_class is FailureClass.CODE
    assert "rank 1 had ended, with exit code 0, and rank 0 still needed it (" in failure.reason


@pytest.mark.slow
def test_a_script_may_use_its_store_until_the_last_rank_has_ended(server: Server, tmp_path: Path) -> None:
    ranks = ranks_of(
        tmp_path,
        "import time\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "store = dist.distributed_c10d._get_default_store()\n"
        "if dist.get_rank() == 1:\n"
        "    time.sleep(4)\n"
        "    store.set('late', 'x')\n"
        "    print(store.get('late'))\n",
    )
    run(server, ranks)
    assert [rank.status for rank in ranks] == ["finished", "finished"], [rank.error for rank in ranks]


CHILDREN = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("killed", ["script", "rank"])
def test_what_a_script_has_started_goes_with_it(server: Server, tmp_path: Path, killed: str) -> None:
    ranks = ranks_of(tmp_path, CHILDREN, 1)
    (pid,) = start(server, ranks)
    log = tmp_path / "logs" / "attempt-3" / "rank-0.log"
    while not log.exists() or not log.read_text().endswith("\n"):
        time.sleep(0.05)
    child = psutil.Process(int(log.read_text()))
    script = child.parent()
    assert script is not None
    os.kill(script.pid if killed == "script" else pid, signal.SIGKILL)
    server.answer()
    assert psutil.wait_procs([child, script], timeout=10)[1] == []


def test_a_script_has_its_device_for_itself(tmp_path: Path) -> None:
    """A CUDA context of its rank's own process would take memory there that the script lacks."""
    with closing(Server(PRELOADED[0], "tests.train_jobs.rank.guarded_gpu")) as guarded:
        (scripted,) = ranks_of(tmp_path, "print('step 1/1, loss 1', flush=True)\n", 1, device=0)
        run(guarded, [scripted])
        assert (scripted.status, scripted.error) == ("finished", None)
        assert scripted.lines[-1]["step"] == 1
        # One of our own step loops takes its device, and hears that it may not.
        (own,) = group_of(tmp_path, 1, device=0, task="causal_lm", script=None, progress=None)
        run(guarded, [own])
        assert own.error is not None
        assert own.error.message == "a CUDA context would be made here"
