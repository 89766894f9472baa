"""Unchanged torchrun scripts: their environment, their logs, their end."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from cluster.config import TrainJobConfig
from train_jobs.errors import ScriptError
from train_jobs.parallel.rendezvous import open_store
from train_jobs.rank.script import RankPlace, ScriptProcess, torchrun_environment

SCRIPTS = Path(__file__).parent / "scripts"


def job(script: Path, *arguments: str) -> TrainJobConfig:
    return TrainJobConfig.model_validate(
        {"task": "script", "script": str(script), "arguments": list(arguments)}
    )


_STORES: list[TCPStore] = []  # a store ends with its object; a rank's lives as long as the rank


def start(config: TrainJobConfig, directory: Path, world_size: int = 2) -> list[ScriptProcess]:
    """All ranks of a script, on one node."""
    store, _ = open_store("127.0.0.1")
    _STORES.append(store)
    master = ("127.0.0.1", store.port)
    return [
        ScriptProcess(
            config,
            torchrun_environment(RankPlace(rank, world_size, rank, world_size, 0, 1), master, "job", 1, 1)
            | {"SHOAL_CHECKPOINT_DIR": str(directory / "checkpoints")},
            directory / f"rank-{rank}.log",
            directory,
        )
        for rank in range(world_size)
    ]


def finish(processes: list[ScriptProcess]) -> list[str]:
    """Wait for all ranks, which have to end well; returns what each printed."""
    assert [process.wait(lambda: False) for process in processes] == ["finished"] * len(processes)
    return [process.log.read_text() for process in processes]


def test_the_environment_is_what_torchrun_sets(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(
        "import json, os, sys\n"
        "print(json.dumps([sorted(os.environ), os.environ['RANK'], os.environ['LOCAL_RANK'],"
        " os.environ['WORLD_SIZE'], os.environ['LOCAL_WORLD_SIZE'], os.environ['MASTER_ADDR'], sys.argv[1:],"
        " __name__, sys.path[0]]))\n"
    )
    theirs = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("--log-dir", str(tmp_path), "--redirects=3", str(script), "a", "b c"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    logs = [
        next(
            path for path in sorted(tmp_path.rglob("stdout.log")) if path.parent.name == str(rank)
        ).read_text()
        for rank in (0, 1)
    ]
    assert len(logs) == 2, theirs.stderr
    for ours, line in zip(finish(start(job(script, "a", "b c"), tmp_path)), logs, strict=True):
        mine, expected = json.loads(ours), json.loads(line)
        assert mine[1:5] == expected[1:5]
        assert mine[6:] == expected[6:]
        # What belongs to torchrun's own agent (its store, its error files, its terminal) is not ours.
        own = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "COLUMNS", "LINES"}
        missing = {key for key in set(expected[0]) - set(mine[0]) if not key.startswith(("TORCH_", "NCCL_"))}
        assert missing <= own


def test_a_plain_ddp_script_runs_with_its_logs_by_rank(tmp_path: Path) -> None:
    outputs = finish(start(job(SCRIPTS / "plain_ddp.py", "--steps", "6"), tmp_path))
    for rank, output in enumerate(outputs):
        assert output.startswith(f"rank {rank} of 2: from step 0 on\n")
        assert f"rank {rank}: step 6, loss" in output
    again = finish(start(job(SCRIPTS / "plain_ddp.py", "--steps", "8"), tmp_path))
    assert again[0].startswith("rank 0 of 2: from step 6 on\n")


@pytest.mark.slow
def test_a_trainer_script_of_hugging_face_runs(tmp_path: Path) -> None:
    outputs = finish(start(job(SCRIPTS / "hf_trainer.py", str(tmp_path / "out")), tmp_path))
    assert "world size 2, loss" in outputs[0]
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.slow
def test_an_accelerate_script_runs(tmp_path: Path) -> None:
    outputs = finish(start(job(SCRIPTS / "accelerated.py"), tmp_path))
    for rank, output in enumerate(outputs):
        assert f"process {rank} of 2, loss 0.0000" in output


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is an extra: pip install 'shoal[deepspeed]'"
)
def test_a_deepspeed_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    outputs = finish(start(job(SCRIPTS / "with_deepspeed.py"), tmp_path))
    for rank, output in enumerate(outputs):
        assert f"rank {rank} of 2, loss 0.0" in output


def test_a_script_that_fails_says_so_with_the_end_of_its_output(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("print('so far'); raise KeyError('the name')")
    (process,) = start(job(script), tmp_path, 1)
    with pytest.raises(ScriptError, match="exit code 1") as caught:
        process.wait(lambda: False)
    assert caught.value.output.startswith("so far\n")
    assert "KeyError: 'the name'" in caught.value.output
    script.write_text("import os; os.kill(os.getpid(), 11)")
    (process,) = start(job(script), tmp_path, 1)
    with pytest.raises(ScriptError, match="ended by SIGSEGV"):
        process.wait(lambda: False)


def test_a_script_that_is_asked_to_stop_gets_sigterm(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saving'), sys.exit(0)))\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    (process,) = start(job(script), tmp_path, 1)
    assert process.wait(lambda: "ready" in process.log.read_text()) == "stopped"
    assert process.log.read_text() == "ready\nsaving\n"


def hold(script: str, directory: str) -> None:
    """Start a script and never end."""
    start(job(Path(script)), Path(directory), 1)
    time.sleep(600)


def test_a_script_goes_with_its_worker(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    worker = multiprocessing.get_context("spawn").Process(target=hold, args=(str(script), str(tmp_path)))
    worker.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(10)
    deadline = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the script outlived its worker"
        time.sleep(0.02)


def test_a_script_runs_in_the_directory_of_its_job_and_its_arguments_name_others(tmp_path: Path) -> None:
    work, script = tmp_path / "work", tmp_path / "work" / "sub" / "show.py"
    script.parent.mkdir(parents=True)
    script.write_text("import json, os, sys\nprint(json.dumps([os.getcwd(), sys.argv[1:], sys.path[0]]))\n")
    config = TrainJobConfig.model_validate(
        {
            "task": "script",
            "script": "sub/show.py",
            "arguments": ["--out=$SHOAL_CHECKPOINT_DIR/x", "${SHOAL_WORK_DIR}", "$HOME", 3, 0.5, True, False],
        }
    )
    environment = {"SHOAL_CHECKPOINT_DIR": "/c", "SHOAL_WORK_DIR": str(work)}
    process = ScriptProcess(config, environment, tmp_path / "log", work)
    assert process.wait(lambda: False) == "finished"
    said = ["--out=/c/x", str(work), "$HOME", "3", "0.5", "true", "false"]
    assert json.loads((tmp_path / "log").read_text()) == [str(work), said, str(script.parent)]
