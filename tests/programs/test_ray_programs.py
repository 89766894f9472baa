"""Programs for Ray itself on a cluster of Shoal's, as their guides have them: Train, Tune and Serve."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.clusters import LiveCluster, shoal
from tests.integration.jobs import wait_until
from tests.serve_apps.strangers import environment, serve_run
from tests.serve_apps.tiny_model import make_model

PROGRAMS = Path(__file__).parent / "ray_programs"
TOOLS = Path(sys.executable).parent

pytestmark = [pytest.mark.programs, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ray-programs") / "project"
    shutil.copytree(PROGRAMS, directory)
    return directory


def ray_job(cluster: LiveCluster, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of `ray job`, under what `shoal env` prints."""
    return subprocess.run(
        [str(TOOLS / "ray"), "job", *words],
        env=cluster.environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def submit(
    cluster: LiveCluster, folder: Path, *entrypoint: str, wait: bool = True
) -> subprocess.CompletedProcess[str]:
    options = ["--working-dir", ".", *([] if wait else ["--no-wait"])]
    return ray_job(cluster, folder, "submit", *options, "--", "python", *entrypoint)


@pytest.fixture
def start(running_cluster: LiveCluster, folder: Path) -> Iterator[Callable[..., str]]:
    """Starts a job that runs on, at most to the end of the test; its id."""
    jobs: list[str] = []

    def started(*entrypoint: str) -> str:
        done = submit(running_cluster, folder, *entrypoint, wait=False)
        assert done.returncode == 0, done.stderr
        jobs.extend(re.findall(r"Job '(\S+)' submitted", done.stdout))
        return jobs[-1]

    yield started
    for job in jobs:
        ray_job(running_cluster, folder, "stop", job)


@dataclass(frozen=True)
class Program:
    """One that saves what it has done, and goes on from there.

    Attributes:
        long: what makes it run for long.
        step: how it prints a step, with its process.
        restored: how it prints where it goes on.
        done: how it prints its end.
        saved: a pattern of the files that it leaves in its storage.
    """

    words: tuple[str, ...]
    long: tuple[str, ...]
    step: str
    restored: str
    done: str
    saved: str


PROGRAMS_OF_RAY = {
    "train": Program(
        ("torch_trainer.py", "--delay", "0.5"),
        ("--epochs", "1000"),
        r"epoch 4, pid (\d+)",
        r"restored, from epoch (\d+) on",
        "done: epoch 19",
        "plain/checkpoint_*/model.pt",
    ),
    "tune": Program(
        ("tune_search.py", "--delay", "0.5"),
        ("--steps", "1000"),
        r"high, step 4, pid (\d+)",
        r"restored high, from step (\d+) on",
        "3 trials, best high, step 19",
        "search/objective_*/checkpoint_*/state.json",
    ),
}


@pytest.fixture(params=PROGRAMS_OF_RAY)
def program(request: pytest.FixtureRequest) -> Program:
    return PROGRAMS_OF_RAY[request.param]


def test_it_is_killed_and_goes_on_from_its_own_checkpoint(
    running_cluster: LiveCluster,
    folder: Path,
    tmp_path: Path,
    program: Program,
    start: Callable[..., str],
) -> None:
    job = start(*program.words, "--storage", str(tmp_path))

    def said() -> str:
        return ray_job(running_cluster, folder, "logs", job).stdout

    wait_until(lambda: re.search(program.step, said()), "its fifth step")
    (pid,) = set(re.findall(program.step, said()))  # Ray may show a line twice
    os.kill(int(pid), signal.SIGKILL)
    wait_until(lambda: program.done in said(), "its end")
    restored = re.findall(program.restored, said())
    assert restored
    assert all(int(step) >= 4 for step in restored)
    wait_until(lambda: "succeeded" in ray_job(running_cluster, folder, "status", job).stdout, "its end")
    assert list(tmp_path.glob(program.saved))


def test_it_is_stopped(
    running_cluster: LiveCluster,
    folder: Path,
    tmp_path: Path,
    program: Program,
    start: Callable[..., str],
) -> None:
    job = start(*program.words, *program.long, "--storage", str(tmp_path))
    wait_until(
        lambda: re.search(program.step, ray_job(running_cluster, folder, "logs", job).stdout), "its start"
    )
    assert ray_job(running_cluster, folder, "stop", job).returncode == 0
    wait_until(lambda: "stopped" in ray_job(running_cluster, folder, "status", job).stdout.lower(), "its end")


def test_it_fails_with_the_exit_code_of_the_program(
    running_cluster: LiveCluster, folder: Path, tmp_path: Path, program: Program
) -> None:
    done = submit(running_cluster, folder, program.words[0], "--storage", str(tmp_path), "--exit-at", "1")
    assert done.returncode == 1
    assert "asked to fail" in done.stdout + done.stderr
    assert "exit code 3" in done.stdout + done.stderr


def twice(url: str) -> int | None:
    """Which process doubles; None where none answers."""
    with suppress(httpx.TransportError, ValueError, KeyError):
        return int(httpx.get(url, params={"n": 1}, timeout=10).json()["pid"])
    return None


def test_another_serve_app_beside_ours(running_cluster: LiveCluster, folder: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    path = tmp_path / "shoal.yaml"
    cluster = running_cluster.config_path.read_text().replace("./", f"{running_cluster.config_path.parent}/")
    path.write_text(f"{cluster}serve_apps:\n  one: {{model: {model}}}\n")
    done = shoal("serve", "one", "--json", "-f", str(path))
    assert done.returncode == 0, done.stderr
    base_url = json.loads(done.stdout)["base_url"]

    def answers() -> bool:
        body = {"model": "one", "prompt": "def", "max_tokens": 2}
        with suppress(httpx.TransportError):
            return httpx.post(f"{base_url}/completions", json=body, timeout=60).status_code == 200
        return False

    assert answers()
    options = ("--name", "doubler", "--route-prefix", "/double")
    url = f"{running_cluster.record.serve_url}/double"
    done = subprocess.run(
        [str(TOOLS / "serve"), "run", "serve_beside:broken", *options],
        env=environment(running_cluster, folder),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    # `serve run` exits 0 even so; why it failed is in the log of Serve's controller.
    assert "Deploying application doubler failed: Failed to update the deployments" in done.stderr
    # It ends Serve, and with it ours; that comes back by itself.
    wait_until(answers, "an answer", 60.0)
    with serve_run(running_cluster, folder, "serve_beside:app", *options, url=f"{url}?n=1"):
        assert httpx.get(url, params={"n": 21}).json()["twice"] == 42
        assert answers()
        pid = httpx.get(url, params={"n": 1}).json()["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: twice(url) not in (None, pid), "another replica of theirs", 60.0)
        assert answers()
    # So does who ends `serve run`.
    wait_until(answers, "an answer", 60.0)
    done = shoal("unserve", "one", "--json", "-f", str(path))
    assert done.returncode == 0, done.stderr
