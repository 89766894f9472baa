"""Programs for Ray itself on a cluster of Shoal's, as their guides have them: Train, Tune and Serve."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.clusters import LiveCluster, shoal
from tests.integration.jobs import wait_until
from tests.serve_apps.strangers import serve_run
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


def test_ray_train_is_killed_and_goes_on_from_its_own_checkpoint(
    running_cluster: LiveCluster, folder: Path, tmp_path: Path
) -> None:
    words = ("torch_trainer.py", "--storage", str(tmp_path), "--delay", "0.5")
    done = submit(running_cluster, folder, *words, wait=False)
    assert done.returncode == 0, done.stderr
    found = re.search(r"Job '(\S+)' submitted", done.stdout)
    assert found is not None, done.stdout
    job = found[1]

    def said() -> str:
        return ray_job(running_cluster, folder, "logs", job).stdout

    wait_until(lambda: "epoch 4, pid" in said(), "its fifth epoch")
    pids = set(re.findall(r"epoch 4, pid (\d+)", said()))  # Ray may show a line twice
    (pid,) = pids
    os.kill(int(pid), signal.SIGKILL)
    wait_until(lambda: "done: epoch 19" in said(), "its end")
    restored = re.findall(r"restored, from epoch (\d+) on", said())
    assert restored
    assert all(int(epoch) >= 4 for epoch in restored)
    assert "succeeded" in ray_job(running_cluster, folder, "status", job).stdout
    assert list((tmp_path / "plain").glob("checkpoint_*/model.pt"))


def test_ray_train_is_stopped(running_cluster: LiveCluster, folder: Path, tmp_path: Path) -> None:
    words = ("torch_trainer.py", "--storage", str(tmp_path), "--delay", "0.5", "--epochs", "1000")
    job = re.findall(r"Job '(\S+)' submitted", submit(running_cluster, folder, *words, wait=False).stdout)[0]
    wait_until(lambda: "epoch 1, pid" in ray_job(running_cluster, folder, "logs", job).stdout, "its start")
    assert ray_job(running_cluster, folder, "stop", job).returncode == 0
    wait_until(lambda: "stopped" in ray_job(running_cluster, folder, "status", job).stdout.lower(), "its end")


def test_ray_train_fails_with_the_exit_code_of_the_program(
    running_cluster: LiveCluster, folder: Path, tmp_path: Path
) -> None:
    done = submit(running_cluster, folder, "torch_trainer.py", "--storage", str(tmp_path), "--exit-at", "1")
    assert done.returncode == 1
    assert "asked to fail" in done.stdout + done.stderr
    assert "exit code 3" in done.stdout + done.stderr


def test_ray_tune_searches(running_cluster: LiveCluster, folder: Path, tmp_path: Path) -> None:
    done = submit(running_cluster, folder, "tune_search.py", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 trials, 0 errors, best lr 0.5" in done.stdout


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
    with serve_run(running_cluster, folder, "serve_beside:app", *options, url=f"{url}?n=1"):
        assert httpx.get(url, params={"n": 21}).json() == {"twice": 42}
        assert answers()
    # Who ends `serve run` ends Serve, and with it ours; that comes back by itself.
    wait_until(answers, "an answer", 60.0)
    done = shoal("unserve", "one", "--json", "-f", str(path))
    assert done.returncode == 0, done.stderr
