"""`shoal quickstart` when it is cut off or cannot start; that it works is what `.ci/run` sees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from cluster.state.state_directory import state_directory
from tests.clusters import caller_environment, shoal, shoal_command

TIMEOUT_S = 400.0
"""Far more than a quickstart takes on a machine that does nothing else."""


def processes_below(directory: Path) -> list[psutil.Process]:
    """The live processes that work in a directory, or have it in their environment or arguments."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        if process.info["status"] == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
            continue
        try:
            facts = [process.cwd(), *process.cmdline(), *process.environ().values()]
        except psutil.Error:  # it has ended
            continue
        if any(str(directory) in fact for fact in facts):
            found.append(process)
    return found


def state_of(process: subprocess.Popen[str]) -> Path:
    """The state directory of a quickstart's cluster, whose name holds the process id."""
    return state_directory(f"quickstart-{process.pid}")


def cut_off(directory: Path, moment: str, number: signal.Signals) -> tuple[subprocess.Popen[str], list[str]]:
    """Run the quickstart, send a signal when it says `moment`, and wait for its end; what it said."""
    process = subprocess.Popen(
        shoal_command("quickstart", "--dir", str(directory)),
        env=caller_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    killer = threading.Timer(TIMEOUT_S, process.kill)
    killer.start()
    said = []
    try:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if moment in line:
                process.send_signal(number)
                moment = "never again"
        process.wait()
    finally:
        killer.cancel()
        process.kill()
        process.wait()
    return process, said


@contextmanager
def nothing_stays(*directories: Path) -> Iterator[None]:
    """Whatever a test finds, its cluster does not run on beside those that come after."""
    try:
        yield
    finally:
        for process in [each for directory in directories for each in processes_below(directory)]:
            with suppress(psutil.NoSuchProcess):  # another one took it along
                process.kill()


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("starting 3 nodes", signal.SIGINT),
        pytest.param("── train", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("attempt 1:", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("chat: starting", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("── share devices", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("── stop the cluster", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_it_leaves_nothing_behind_whenever_it_is_cut_off(
    tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    process, said = cut_off(tmp_path / "tour", moment, number)
    with nothing_stays(tmp_path, state_of(process)):
        assert any(moment in line for line in said), "".join(said)
        assert process.returncode == 130, "".join(said)
        assert not any("Traceback" in line for line in said), "".join(said)
        assert not state_of(process).exists()
        assert processes_below(tmp_path) == []
        assert processes_below(state_of(process)) == []


def test_a_directory_in_use_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    done = shoal("quickstart", "--dir", str(tmp_path), "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{tmp_path} is not an empty directory; quickstart writes its files there\n"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.slow
def test_a_step_that_fails_is_told_and_ends_it_with_1_and_its_files_stay(tmp_path: Path) -> None:
    done = shoal("quickstart", "--json", RAY_OVERRIDE_RESOURCES="no JSON", TMPDIR=str(tmp_path))
    document = json.loads(done.stdout)
    assert (done.returncode, document["ok"]) == (1, False)
    steps = {step["name"]: step for step in document["steps"]}
    assert list(steps) == ["write the config", "start the cluster", "stop the cluster"]
    assert not steps["start the cluster"]["ok"]
    assert "did not start (exit code 1)" in steps["start the cluster"]["detail"]
    assert steps["stop the cluster"]["ok"]
    assert "Traceback" not in done.stderr.replace("  Traceback", ""), "only the node's own log has one"
    (left,) = tmp_path.glob("shoal-quickstart-*/")
    assert done.stderr.endswith(f"its jobs, logs and events are in {left}\n")
    assert (left / "shoal.yaml").is_file()
    assert processes_below(tmp_path) == []
