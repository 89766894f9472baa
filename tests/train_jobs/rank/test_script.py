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

from cluster.config.sections.train import TrainJobConfig
from train_jobs.errors import ScriptError
from train_jobs.parallel.rendezvous import open_store
from train_jobs.rank.script import RankPlace, ScriptProcess, torchrun_environment
from train_jobs.watch.rank_stacks import main_frames

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
        # What belongs to torchrun's own agent (its signals, its terminal) is not ours; the error file comes
        # from whoever knows where the job's logs are.
        own = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "COLUMNS", "LINES"}
        assert set(expected[0]) - set(mine[0]) <= own


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
    with pytest.raises(ScriptError, match="ended by SIGSEGV") as caught:
        process.wait(lambda: False)
    assert 'fails.py", line 1 in <module>' in caught.value.output, "where it stood"


AT_THE_END = """
import ctypes, sys, time
abort = ctypes.CDLL(None).abort
{work}
print("saved", flush=True)
{end}
"""


@pytest.mark.parametrize(
    "end",
    [
        # In the destructor of a library, after Python has gone: what torch's process groups do.
        "ctypes.CDLL(None).__cxa_atexit(ctypes.cast(abort, ctypes.c_void_p), None, None)",
        # While Python takes its modules down.
        "class Last:\n    def __del__(self, abort=abort): abort()\nsys.modules['last'] = Last()",
    ],
)
def test_a_crash_when_the_program_is_over_is_its_end(tmp_path: Path, end: str) -> None:
    script = tmp_path / "ends.py"
    script.write_text(AT_THE_END.format(work="time.sleep(0.5)", end=end))
    (output,) = finish(start(job(script), tmp_path, 1))
    assert output.startswith("saved\n")
    assert output.endswith(
        "[shoal] the script was ended by SIGABRT, after its last line of Python: it has finished\n"
    )


@pytest.mark.parametrize(
    ("work", "end"),
    [
        ("abort()", ""),  # in the middle of it
        ("time.sleep(0.5)", "import threading; threading.Thread(target=abort).start(); time.sleep(9)"),
        # Nothing is known of one that takes the fault handler away, or has its output elsewhere.
        ("import faulthandler; faulthandler.disable(); time.sleep(0.9)", "abort()"),
        ("import os; os.dup2(os.open('err', os.O_CREAT | os.O_WRONLY), 2); time.sleep(0.9)", "abort()"),
        # Its stacks are longer than the end of an output that people are shown.
        (
            "import threading; [threading.Thread(target=time.sleep, args=(99,), daemon=True).start()"
            " for _ in range(60)]; time.sleep(0.5)",
            "abort()",
        ),
        # There are more threads than are written down.
        (
            "import threading; [threading.Thread(target=time.sleep, args=(99,), daemon=True).start()"
            " for _ in range(130)]; time.sleep(0.5)",
            "abort()",
        ),
        # An exception was on its way out.
        ("import atexit; atexit.register(abort)", "raise KeyError('x')"),
    ],
)
def test_a_crash_within_the_program_is_none(tmp_path: Path, work: str, end: str) -> None:
    script = tmp_path / "fails.py"
    script.write_text(AT_THE_END.format(work=work, end=end))
    (process,) = start(job(script), tmp_path, 1)
    with pytest.raises(ScriptError, match="ended by SIGABRT"):
        process.wait(lambda: False)


def test_one_that_hangs_says_where_its_threads_stand(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(
        "import threading, time\n"
        "def other():\n    time.sleep(600)\n"
        "threading.Thread(target=other, daemon=True).start()\n"
        "print('ready', flush=True)\n"
        "threading.Event().wait()\n"
    )
    (process,) = start(job(script), tmp_path, 1)
    seen = ""
    while "ready" not in seen:
        seen += process.new_output()
        time.sleep(0.05)
    stacks = process.abort()
    assert "in other" in stacks
    assert main_frames(stacks)[-1] == (str(script), "<module>")
    process.kill()


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


@pytest.mark.parametrize(
    ("saving", "save_timeout_s", "ends"), [(True, 600.0, True), (False, 600.0, False), (True, 0.5, False)]
)
def test_a_script_that_is_asked_to_stop_has_longer_while_it_saves(
    saving: bool, save_timeout_s: float, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train_jobs.rank.script.STOP_GRACE_S", 0.2)
    script, enough = tmp_path / "saves.py", tmp_path / "enough"
    script.write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
        "print('ready', flush=True)\n"
        f"while not os.path.exists({str(enough)!r}): time.sleep(0.05)\n"
        "print('saved')\n"
    )
    asked = []

    def is_saving() -> bool:
        asked.append(time.monotonic())
        if ends and asked[-1] - asked[0] > 1.0:
            enough.touch()
        return saving

    config = job(script)
    recovery = config.recovery.model_copy(update={"save_timeout_s": save_timeout_s})
    (process,) = start(config.model_copy(update={"recovery": recovery}), tmp_path, 1)
    stop = process.wait(lambda: "ready" in process.log.read_text(), is_saving=is_saving)
    assert (stop, "saved" in process.log.read_text()) == ("stopped", ends)


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


SHOW = "import json, os, sys\nprint(json.dumps([os.getcwd(), sys.path[0], sys.argv]))\n"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ({"script": "sub/show.py", "cwd": "sub"}, ["sub", "sub", "show.py"]),
        ({"script": "show.py", "cwd": "sub"}, ["sub", "", "../show.py"]),
        ({"module": "sub.show"}, ["", "", "sub/show.py"]),
        ({"module": "show", "cwd": "sub"}, ["sub", "sub", "sub/show.py"]),
        ({"module": "sub"}, ["", "", "sub/__main__.py"]),
    ],
)
def test_a_module_or_a_script_runs_as_python_itself_would_run_it_there(
    tmp_path: Path, command: dict[str, str], expected: list[str]
) -> None:
    work = tmp_path / "work"
    (work / "sub").mkdir(parents=True)
    for name in ("show.py", "sub/show.py", "sub/__main__.py"):
        (work / name).write_text(
            "import json, os, sys\nprint(json.dumps([os.getcwd(), sys.path[0], sys.argv]))\n"
        )
    config = TrainJobConfig.model_validate({"task": "script", "arguments": ["a"], **command})
    process = ScriptProcess(config, {}, tmp_path / "log", work)
    assert process.wait(lambda: False) == "finished"
    cwd, path, (name, *rest) = json.loads((tmp_path / "log").read_text())
    assert (cwd, path, rest) == (str(work / expected[0]), str(work / expected[1]), ["a"])
    assert name in (expected[2], str(work / expected[2]))
