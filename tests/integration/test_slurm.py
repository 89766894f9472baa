"""A cluster on the nodes of a batch job, on a site with Slurm: hosts of their own with one disk for homes."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infra.lab.hosts.slurm_site import SlurmSite
from tests import waiting
from tests.slurm_hosts import SlurmUser, needs_slurm, slurm_site_of

pytestmark = [needs_slurm, pytest.mark.timeout(300)]

HELLO = """
import os, socket
print("hello from", socket.gethostname(), open("words.txt").read(), os.environ["OF_THE_CALLER"])
print("ranks of others:", [name for name in os.environ if name in ("SLURM_PROCID", "SLURM_NTASKS")])
"""
JOB = {
    "task": "script",
    "script": "hello.py",
    "workers": {"min": 1, "max": 1},
    "env": {"OF_THE_CALLER": None},
}
WAIT_S = 60.0
wait_for = partial(waiting.wait_for, timeout_s=WAIT_S)


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slurm")


@pytest.fixture(scope="module")
def site(homes: Path) -> Iterator[SlurmSite]:
    with slurm_site_of(homes) as site:
        yield site


@pytest.fixture
def user(site: SlurmSite, homes: Path) -> Iterator[SlurmUser]:
    user = SlurmUser(site, homes / "homes", environment={"OF_THE_CALLER": "secret"})
    yield user
    user.environment.pop("PATH", None)
    # Of a test that has failed.
    user.run(
        "sh", "-c", "scancel --me; while squeue --noheader | grep -q .; do sleep 0.2; done; rm -rf .local"
    )


def left_on(site: SlurmSite) -> set[str]:
    """What runs on its nodes and is not Slurm's."""
    return set().union(*(node.names() for node in site.nodes)) - {"munged", "slurmd"}


def refusal(user: SlurmUser, **slurm: Any) -> str:
    """What `up` says when it does not work; nothing is left of it."""
    user.write({"slurm": {"nodes": 2, "cpus_per_node": 2, **slurm}})
    done = user.shoal("up")
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr
    assert not user.state().exists()
    return done.stderr.strip()


def test_what_slurm_refuses_is_told_in_its_words(user: SlurmUser) -> None:
    said = refusal(user, partition="nowhere")
    assert said == (
        "`sbatch`: sbatch: error: invalid partition specified: nowhere sbatch: error: Batch job submission"
        " failed: Invalid partition name specified"
    )
    user.environment["PATH"] = "/nowhere"
    assert refusal(user) == (
        "there is no `sbatch` here: `provider: slurm` needs Slurm's commands, as a login node has them"
    )


@pytest.mark.slow
def test_a_python_without_shoal_is_told_with_what_it_said(user: SlurmUser) -> None:
    said = refusal(user, python="/usr/bin/python3", nodes=1).splitlines()
    assert said[0].startswith("submitted: Slurm's job ")
    assert said[-2].endswith("has ended before the cluster was up; it said last:")
    assert said[-1] == "  Shoal is not installed for /usr/bin/python3 on n1, which slurm.python names"


def test_whoever_interrupts_up_leaves_the_job_in_the_queue(user: SlurmUser, site: SlurmSite) -> None:
    user.write({"slurm": {"nodes": 2, "cpus_per_node": 500}})
    with (user.home / "said").open("w") as said:
        up = site.login.start(
            *user.command("up"), environment={"PYTHONPATH": str(_repository())}, user=user.name, output=said
        )
        wait_for(lambda: "waits in the queue" in (user.home / "said").read_text(), "it does not wait")
        (command,) = [each for each, words in site.login.commands() if "infra.cli.main" in words]
        command.send_signal(signal.SIGINT)
        assert up.wait(20) != 0
    text = (user.home / "said").read_text()
    assert "PartitionConfig (no nodes of its partition have what it asks for: as it is it will not" in text
    assert "stays in the queue: `shoal up` follows it again, `shoal down` cancels it" in text
    status = user.shoal("status")
    assert status.returncode == 1
    assert "cluster lab is not up: Slurm's job" in status.stderr
    assert "waits in the queue" in status.stderr
    done = user.document("down")
    assert done == {"name": "lab", "stopped": True}
    assert user.slurm("squeue", "--noheader") == ""
    assert not user.state().exists()


def _repository() -> Path:
    from infra.lab.hosts.lan import REPOSITORY

    return REPOSITORY


@pytest.mark.slow
def test_a_cluster_from_the_queue_to_its_end(user: SlurmUser, site: SlurmSite) -> None:
    """One story, since a start costs seconds: up, a job, up again, its nodes asked, down."""
    config = user.write(train_jobs={"hello": JOB})
    user.run("sh", "-c", "cat > hello.py; echo from the login node > words.txt", given=HELLO)
    began = time.monotonic()
    up = user.document("up")
    print(f"up after {time.monotonic() - began:.1f} s")
    assert [(each["name"], each["alive"], each["resources"]["CPU"]) for each in up["nodes"]] == [
        ("n1", True, 2),
        ("n2", True, 2),
    ]

    script = user.slurm(*user.command("render", "slurm"))
    assert f"-f {config}" in script
    assert "#SBATCH --signal=B:TERM@120" in script

    began = time.monotonic()
    done = user.shoal("train", "hello")
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert "hello from n" in said
    assert "from the login node" in said
    assert "secret" in said
    assert "ranks of others: []" in said

    again = user.shoal("up")
    assert again.returncode == 0
    assert "cluster lab is up already" in again.stderr
    assert user.slurm(*user.command("ssh", "n2", "hostname")).strip() == "n2"
    lines = user.slurm(*user.command("logs", "--node", "n2", "--tail", "3"))
    assert "[raylet.out]" in lines
    exports = user.slurm(*user.command("env"))
    assert f"SHOAL_API_URL=http://{site.nodes[0].address}:8270" in exports

    began = time.monotonic()
    assert user.document("down") == {"name": "lab", "stopped": True}
    print(f"down after {time.monotonic() - began:.1f} s")
    assert user.slurm("squeue", "--noheader") == ""
    assert left_on(site) == set()
    assert not user.state().exists()
    for node in site.nodes:
        assert not list(node.file("/tmp").glob("shoal-*/@*")), "a node's directory is left"


@pytest.mark.slow
def test_a_script_that_somebody_submits_by_hand_is_followed(user: SlurmUser, site: SlurmSite) -> None:
    user.write({"slurm": {"nodes": 1, "cpus_per_node": 2}})
    script = user.slurm(*user.command("render", "slurm"))
    (mkdir,) = [line.removeprefix("#   ") for line in script.splitlines() if line.startswith("#   (umask")]
    user.slurm("sh", "-c", mkdir)
    done = user.run("sbatch", "--parsable", given=script)
    assert done.returncode == 0, done.stderr
    number = done.stdout.strip()
    wait_for(lambda: (user.state() / "slurm.json").exists(), "the job does not say that it is there")
    up = user.shoal("up")
    assert up.returncode == 0, up.stderr
    assert json.loads((user.state() / "slurm.json").read_text())["number"] == number
    assert user.slurm("squeue", "--noheader", "--format=%i").split() == [number]
    # Whoever cancels it by Slurm's own means leaves nothing either.
    user.slurm("scancel", number)
    wait_for(lambda: user.slurm("squeue", "--noheader") == "", "it does not end")
    assert left_on(site) == set()
    status = user.shoal("status")
    assert f"Slurm's job {number} has ended; `shoal up` submits another" in status.stderr
    assert user.document("down")["stopped"]
    assert not user.state().exists()
