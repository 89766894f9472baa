"""The page of Slurm, its commands run as they stand there, in one shell, as a reader runs them; and the whole
way through Shoal on such a cluster."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.lab.hosts.lan import REPOSITORY
from tests.slurm_hosts import SlurmUser, needs_slurm, slurm_site_of
from tests.ssh_hosts import HEALTH

pytestmark = [needs_slurm, pytest.mark.slow, pytest.mark.timeout(900)]

PAGE = REPOSITORY / "cluster/hosts/slurm/README.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MARK = "-- block"
MERGE = """
import json, yaml
whole = yaml.safe_load(open("shoal.yaml"))
whole["cluster"] = json.load(open("../section.json"))
whole["train_jobs"]["stdlib-lm"]["steps"] = 20
yaml.safe_dump(whole, open("shoal.yaml", "w"))
"""
"""Takes the page's section; the training is shorter than a reader's."""


@pytest.fixture
def user(tmp_path: Path) -> Iterator[SlurmUser]:
    tmp_path.chmod(0o755)
    with slurm_site_of(tmp_path) as site:
        yield SlurmUser(site, tmp_path / "homes")


def nothing_runs(user: SlurmUser) -> bool:
    left = set().union(*(node.names() for node in user.site.nodes))
    return left <= {"munged", "slurmd"} and user.slurm("squeue", "--noheader") == ""


def adapted(config: str) -> dict[str, Any]:
    """The page's section `cluster`, for the site that there is: without GPUs, and without accounts."""
    cluster: dict[str, Any] = yaml.safe_load(config)["cluster"]
    slurm = cluster["slurm"]
    assert (slurm.pop("gpus_per_node"), slurm.pop("extra")) == (8, ["--qos=normal"])
    cluster["slurm"] = {**slurm, "partition": "main", "cpus_per_node": 2}
    return {**cluster, "env": HEALTH}


def test_every_command_of_the_page_does_what_it_says(user: SlurmUser) -> None:
    blocks = BLOCK.findall(PAGE.read_text())
    (config,) = [text for language, text in blocks if language == "yaml"]
    commands = [text for language, text in blocks if language == "sh"]
    assert "pip install shoal\n" in commands[0]
    # It is installed: the environment is the one that runs this test.
    commands[0] = commands[0].replace("python3 -m venv venv && . venv/bin/activate\npip install shoal\n", "")
    lines = ["set -euo pipefail"]
    for place, text in enumerate(commands):
        lines += [f"echo; echo '{MARK} {place}'", text.replace("gpu-1", "n1")]
        if place == 0:
            lines.append(f"python -c '{MERGE}'")
    user.run("sh", "-c", "cat > section.json", given=json.dumps(adapted(config)))
    programs = str(Path(sys.executable).parent)
    user.environment["PATH"] = f"{programs}:/usr/local/bin:/usr/bin:/bin"
    done = user.run("bash", "-c", "\n".join(lines), timeout_s=500)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    told = re.split(rf"^{MARK} \d+\n", done.stdout, flags=re.MULTILINE)[1:]
    _, brought_up, used, ended = told
    assert "is valid: 2 nodes, 1 job, 1 app" in brought_up
    assert re.search(r"│ n2 +│ alive", brought_up)
    assert re.search(r"stdlib-lm-\S+ succeeded at step", used)
    answer = json.loads(used.strip().splitlines()[-1])
    assert answer["choices"][0]["text"]
    assert "#SBATCH --time=2-00:00:00" in ended
    assert " load average: " in ended
    assert "[raylet.out] " in ended
    assert ended.splitlines()[-1] == "cluster lab is down"
    assert nothing_runs(user)


def test_the_whole_way_on_a_batch_job(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    # Whole nodes, with no device more than training and two replicas want.
    with slurm_site_of(tmp_path, nodes=2, cpus=(2, 3)) as site:
        go_the_whole_way(SlurmUser(site, tmp_path / "homes"))


def go_the_whole_way(user: SlurmUser) -> None:
    user.write({"slurm": {"nodes": 2}})
    report = user.document("quickstart", "--dir", "tour", timeout_s=600)
    for step in report["steps"]:
        print(f"{step['name']}: {step['seconds']:.1f} s: {step['detail']}")
    assert report["ok"]
    (shared,) = [step for step in report["steps"] if step["name"] == "share devices under load"]
    assert "steps lost, none of" in shared["detail"]
    assert nothing_runs(user)
